// Which pages of a request a layer group needs: windows, sinks and scratch.
//
// All functions are pure. Page p holds tokens [p * tokens_per_block, (p + 1) * tokens_per_block).
// `history` tokens are computed; the step at hand writes tokens [history, capacity).
// REQUIRES, of all: tokens_per_block >= 1, 0 <= history <= capacity, max_rewind_len >= 0.
#pragma once

#include <cstdint>
#include <optional>

namespace sparse_kvcm {

// Pages [begin, end).
struct PageRange {
  std::int32_t begin = 0;
  std::int32_t end = 0;
  [[nodiscard]] std::int32_t size() const { return end - begin; }
  [[nodiscard]] bool contains(std::int32_t page) const { return begin <= page && page < end; }
  friend bool operator==(const PageRange&, const PageRange&) = default;
};

// Pages with equal life cycles are needed, and go, at the same time.
struct LifeCycle {
  std::optional<std::int32_t> sliding_window_size;
  std::int32_t num_sink_tokens = 0;
  bool is_sparse = false;
  friend bool operator==(const LifeCycle&, const LifeCycle&) = default;
};

// Pages that no query at position `history` or later reads: behind the sinks, before the window.
// Empty without a window.
[[nodiscard]] PageRange stale_pages(const LifeCycle& life_cycle, std::int32_t tokens_per_block,
                                    std::int32_t history);

// Pages that the step writes first and that are stale when it ends, even if max_rewind_len tokens
// of it are taken back. Each layer needs them only while it runs, so they share scratch slots.
[[nodiscard]] PageRange scratch_pages(const LifeCycle& life_cycle, std::int32_t tokens_per_block,
                                      std::int32_t history, std::int32_t capacity,
                                      std::int32_t max_rewind_len);

// Most pages that a request of any length up to `length` holds at once while it decodes token by
// token; the most of all lengths without `length`. The latter REQUIRES a window.
[[nodiscard]] std::int32_t most_pages(const LifeCycle& life_cycle, std::int32_t tokens_per_block,
                                      std::int32_t length);
[[nodiscard]] std::int32_t most_pages(const LifeCycle& life_cycle, std::int32_t tokens_per_block);

}  // namespace sparse_kvcm
