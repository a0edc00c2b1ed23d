// Random numbers, random configurations and launch buffers of the random programs. What a launch
// reads and writes is memory that host and device share (shared_memory.hpp).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <memory_resource>
#include <utility>
#include <vector>

#include "sparse_kvcm/kv_cache_manager.hpp"
#include "unit_bytes.hpp"

namespace sparse_kvcm::testing {

// The same numbers on every machine.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(mix(seed)) {}
  // In [0, n).
  std::int32_t below(std::int32_t n) {
    state_ += 0x9E3779B97F4A7C15u;
    return static_cast<std::int32_t>((mix(state_) >> 32) % static_cast<std::uint64_t>(n));
  }
  std::int32_t between(std::int32_t low, std::int32_t high) { return low + below(high - low + 1); }
  bool percent(std::int32_t p) { return below(100) < p; }
  template <class T>
  T pick(const std::vector<T>& from) {
    return from[static_cast<std::size_t>(below(static_cast<std::int32_t>(from.size())))];
  }
  template <class T>
  void shuffle(std::vector<T>& v) {
    for (std::size_t i = v.size(); i > 1; --i)
      std::swap(v[i - 1], v[static_cast<std::size_t>(below(static_cast<std::int32_t>(i)))]);
  }

 private:
  std::uint64_t state_;
};

// Small pages, leases and pools, so that 50 operations reach their ends.
[[nodiscard]] KvCacheManagerConfig random_config(Random& random);

// Poisoned outputs of one launch: the Batch's own, the caller's, or a mixture.
class LaunchOutputs {
 public:
  // `own` has one bit per member of ResolveOutputs, set = the caller's.
  LaunchOutputs(const ResolveOutputs& defaults, std::uint32_t own, std::int32_t b, std::int32_t k,
                std::int32_t max_new_units, std::pmr::memory_resource* memory);
  [[nodiscard]] const ResolveOutputs& argument() const { return argument_; }  // null where default
  [[nodiscard]] const ResolveOutputs& all() const { return all_; }

 private:
  std::vector<std::pmr::vector<std::int32_t>> ints_;
  std::pmr::vector<std::uint32_t> errors_;
  ResolveOutputs argument_;
  ResolveOutputs all_;
};

inline constexpr std::int32_t kUnwritten = 0x5A5A5A5A;

// Ordinal -> slot of the cached units of one lease in one group.
using Residents = std::map<std::int32_t, std::int32_t>;

enum class Phase : std::uint8_t { kResolved, kFetched, kWritten };

struct Launch {
  explicit Launch(std::pmr::memory_resource* memory) : rows(memory), selection(memory) {}

  std::int32_t batch = 0;
  std::int32_t group = 0;
  std::int32_t k = 0;
  std::int64_t stride = 0;
  Phase phase = Phase::kResolved;
  bool partly_written = false;
  std::pmr::vector<std::int32_t> rows;       // [b]
  std::pmr::vector<std::int32_t> selection;  // [b, stride]
  std::vector<std::uint8_t> served;          // [b]: neither padding nor invalid nor stale
  std::vector<std::int32_t> slots;           // [b, k], copied from the outputs
  std::vector<std::int32_t> write_slots;     // [b, max_new_units], copied
  std::shared_ptr<LaunchOutputs> outputs;
  [[nodiscard]] std::int32_t b() const { return static_cast<std::int32_t>(rows.size()); }
  [[nodiscard]] std::int32_t selected(std::int32_t i, std::int32_t j) const {
    return selection[static_cast<std::size_t>(i * stride + j)];
  }
  [[nodiscard]] std::int32_t slot(std::int32_t i, std::int32_t j) const {
    return slots[static_cast<std::size_t>(i * k + j)];
  }
};

}  // namespace sparse_kvcm::testing
