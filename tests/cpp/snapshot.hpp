// Everything that the public surface shows of a manager, its requests and its Batches, on the CPU
// backend. Two equal snapshots around a refused call show that it changed nothing.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "sparse_kvcm/kv_cache_manager.hpp"

namespace sparse_kvcm::testing {

using KvCachePtr = std::shared_ptr<KvCache>;
using BatchPtr = std::shared_ptr<Batch>;

struct RequestView {
  KvCacheState state = KvCacheState::kClosed;
  // need, length, committed, watermark, window_begin, row or -1, capacity, history
  std::vector<std::int32_t> numbers;
  std::optional<Lease> lease;
  std::vector<std::int32_t> host_pages;
  std::vector<std::vector<std::int32_t>> tables;   // per layer group
  std::vector<std::vector<DecodedEntry>> entries;  // per group, while ACTIVE
  friend bool operator==(const RequestView&, const RequestView&) = default;
};

struct BatchView {
  std::uint32_t clock = 0;
  bool step_open = false;
  std::vector<std::int32_t> dirty_rows;
  std::vector<RowState> row_states;
  std::vector<std::int32_t> page_tables;  // of all layer groups
  std::vector<std::int32_t> page_counts;
  friend bool operator==(const BatchView&, const BatchView&) = default;
};

struct Snapshot {
  std::vector<std::int64_t> occupancy;
  std::vector<std::int64_t> free_slots;  // per pool group
  std::vector<RequestView> requests;
  std::vector<BatchView> batches;
  std::uint64_t bytes = 0;  // hash of arenas, host history and pools, if asked for
  friend bool operator==(const Snapshot&, const Snapshot&) = default;
};

enum class WithBytes : std::uint8_t { kNo, kYes };

// Batches must not be closed.
[[nodiscard]] Snapshot take_snapshot(const KvCacheManager& manager,
                                     const std::vector<KvCachePtr>& requests,
                                     const std::vector<BatchPtr>& batches, WithBytes with_bytes);

// The first thing in which two snapshots differ; empty if they are equal.
[[nodiscard]] std::string first_difference(const Snapshot& before, const Snapshot& after);

[[nodiscard]] std::vector<std::int64_t> numbers(const Occupancy& occupancy);

}  // namespace sparse_kvcm::testing
