#include "sparse_kvcm/page_range.hpp"

#include <algorithm>
#include <limits>

#include "core/rounding.hpp"

namespace sparse_kvcm {
namespace {

// Sums of lengths, windows and pages exceed 32 bits.
std::int32_t as_page(std::int64_t page) { return static_cast<std::int32_t>(page); }

}  // namespace

PageRange stale_pages(const LifeCycle& life_cycle, std::int32_t tokens_per_block,
                      std::int32_t history) {
  if (!life_cycle.sliding_window_size) return {};
  const std::int32_t sinks = ceil_div(life_cycle.num_sink_tokens, tokens_per_block);
  const std::int32_t begin = std::min(ceil_div(history, tokens_per_block), sinks);
  // First token that the query at position `history` reads.
  const std::int64_t first = std::int64_t{history} + 1 - *life_cycle.sliding_window_size;
  const std::int32_t end = as_page(std::max<std::int64_t>(first, 0) / tokens_per_block);
  return {begin, std::max(begin, end)};
}

PageRange scratch_pages(const LifeCycle& life_cycle, std::int32_t tokens_per_block,
                        std::int32_t history, std::int32_t capacity, std::int32_t max_rewind_len) {
  const PageRange stale =
      stale_pages(life_cycle, tokens_per_block, std::max(0, capacity - max_rewind_len));
  const std::int32_t begin = std::max(stale.begin, ceil_div(history, tokens_per_block));
  const std::int32_t end = std::min(stale.end, ceil_div(capacity, tokens_per_block));
  return begin < end ? PageRange{begin, end} : PageRange{};
}

std::int32_t most_pages(const LifeCycle& life_cycle, std::int32_t tokens_per_block,
                        std::int32_t length) {
  const std::int32_t pages = ceil_div(length, tokens_per_block);
  if (!life_cycle.sliding_window_size) return pages;
  return std::min(pages, most_pages(life_cycle, tokens_per_block));
}

// The window [h + 1 - W, h] touches the most pages where it begins with a page's last token.
std::int32_t most_pages(const LifeCycle& life_cycle, std::int32_t tokens_per_block) {
  const std::int32_t sinks = ceil_div(life_cycle.num_sink_tokens, tokens_per_block);
  const std::int64_t window = *life_cycle.sliding_window_size;
  const std::int64_t touched = (window + tokens_per_block - 2) / tokens_per_block + 1;
  return as_page(std::min<std::int64_t>(sinks + touched, std::numeric_limits<std::int32_t>::max()));
}

}  // namespace sparse_kvcm
