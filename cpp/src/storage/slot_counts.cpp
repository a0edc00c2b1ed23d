// From batches to slots: what they take, the least there must be, the longest sequence that fits.
#include <algorithm>
#include <cmath>
#include <utility>

#include "core/check.hpp"
#include "core/rounding.hpp"
#include "sparse_kvcm/storage_layout.hpp"
#include "storage/config_check.hpp"

namespace sparse_kvcm {
namespace {

// Without any batch in the config: a decoding request just behind a page boundary.
BatchDesc default_step() { return {{{2049, 2048}}, 0}; }

// The least total at which `slots` can be resumed.
std::int64_t with_headroom(std::int64_t slots, double max_util) {
  auto total = static_cast<std::int64_t>(std::ceil(static_cast<double>(slots) / max_util));
  while (!fits(slots, total, max_util)) ++total;
  return total;
}

// Pages [begin, end) that some request of the batch has, in the part that all of them share.
std::int64_t count_union(std::vector<PageRange> ranges) {
  std::ranges::sort(ranges, {}, &PageRange::begin);
  std::int64_t pages = 0;
  std::int32_t end = 0;
  for (const PageRange& range : ranges) {
    const std::int32_t begin = std::max(range.begin, end);
    if (begin < range.end) pages += range.end - begin;
    end = std::max(end, range.end);
  }
  return pages;
}

std::int64_t part_behind(PageRange range, std::int32_t first) {
  return std::max(0, range.end - std::max(range.begin, first));
}

PageRange part_before(PageRange range, std::int32_t end) {
  return {std::min(range.begin, end), std::min(range.end, end)};
}

}  // namespace

// A request has the pages before and behind its stale ones; its scratch pages are slots that none
// share.
std::int64_t StorageLayout::count_slots_of(std::int32_t layer_group, const BatchDesc& batch) const {
  const std::int32_t page = config_.tokens_per_block;
  const LifeCycle& life_cycle = layer_groups_[static_cast<std::size_t>(layer_group)].life_cycle;
  const std::int32_t shared = batch.system_prompt_length / page;
  std::vector<PageRange> ranges;
  std::int64_t slots = 0;
  for (const KvCacheDesc& request : batch.kv_caches) {
    const std::int32_t end = ceil_div(request.capacity, page);
    const PageRange stale = stale_pages(life_cycle, page, request.history_length);
    const PageRange scratch = scratch_range(layer_group, request);
    PageRange behind{stale.end, end};
    PageRange last{end, end};
    if (scratch.size() > 0) {
      behind.end = scratch.begin;
      last = {scratch.end, end};
      slots += scratch_slots(layer_group, scratch.size());
    }
    for (const PageRange& range : {PageRange{0, stale.begin}, behind, last}) {
      slots += part_behind(range, shared);
      ranges.push_back(part_before(range, shared));
    }
  }
  return slots + count_union(std::move(ranges));
}

std::vector<std::int64_t> StorageLayout::count_slots(const BatchDesc& batch) const {
  check_batch("StorageLayout.count_slots", "batch", batch);
  std::vector<std::int64_t> slots(pool_groups_.size());
  for (std::size_t g = 0; g < pool_groups_.size(); ++g) {
    for (const std::int32_t group : pool_groups_[g].layer_groups) {
      slots[g] += count_slots_of(group, batch);
    }
  }
  return slots;
}

std::vector<std::int64_t> StorageLayout::min_slots() const {
  std::int64_t widest = 1;
  for (const LayerGroupDesc& group : layer_groups_) {
    if (!group.life_cycle.sliding_window_size) continue;
    widest = std::max<std::int64_t>(widest, most_pages(group.life_cycle, config_.tokens_per_block));
  }
  std::vector<std::int64_t> slots(pool_groups_.size());
  for (const BatchDesc& batch : config_.constraints) {
    const std::vector<std::int64_t> needed = count_slots(batch);
    std::ranges::transform(slots, needed, slots.begin(), std::ranges::max);
  }
  for (std::size_t g = 0; g < pool_groups_.size(); ++g) {
    std::int64_t floor = 0;
    for (const std::int32_t id : pool_groups_[g].layer_groups) {
      const LifeCycle& life_cycle = layer_groups_[static_cast<std::size_t>(id)].life_cycle;
      floor += life_cycle.sliding_window_size ? most_pages(life_cycle, config_.tokens_per_block)
                                              : widest;
    }
    slots[g] = pool_groups_[g].is_cold
                   ? 1
                   : with_headroom(std::max(slots[g], floor), config_.max_util_for_resume);
  }
  return slots;
}

// What pools are balanced for.
std::vector<BatchDesc> StorageLayout::typical_batches() const {
  if (config_.typical_step) return {*config_.typical_step};
  if (config_.constraints.empty()) return {default_step()};
  return config_.constraints;
}

// Slots of each layer group in those batches.
std::vector<std::int64_t> StorageLayout::typical_slots() const {
  const std::vector<BatchDesc> batches = typical_batches();
  std::vector<std::int64_t> slots(layer_groups_.size(), 1);
  for (std::size_t g = 0; g < slots.size(); ++g) {
    for (const BatchDesc& batch : batches) {
      slots[g] = std::max(slots[g], count_slots_of(static_cast<std::int32_t>(g), batch));
    }
  }
  return slots;
}

KvCacheDesc longest_of(const BatchDesc& batch) {
  return *std::ranges::max_element(batch.kv_caches, {}, &KvCacheDesc::capacity);
}

BatchDesc StorageLayout::suspended() const {
  if (config_.suspended) return *config_.suspended;
  std::vector<KvCacheDesc> longest;
  for (const BatchDesc& batch : typical_batches()) longest.push_back(longest_of(batch));
  const std::int32_t length = longest_of({longest, 0}).capacity;
  return {{{length, length}}, 0};
}

std::vector<std::int64_t> StorageLayout::cold_slots_of(const BatchDesc& suspended) const {
  std::vector<std::int64_t> slots = count_slots(suspended);
  for (std::size_t g = 0; g < slots.size(); ++g) {
    slots[g] = pool_groups_[g].is_cold ? std::max<std::int64_t>(slots[g], 1) : 0;
  }
  return slots;
}

std::vector<std::int64_t> StorageLayout::cold_slots() const { return cold_slots_of(suspended()); }

// The longest step of the config in whole pages, in tokens; 0 if none has more than one token.
std::int64_t StorageLayout::prefill_step() const {
  std::vector<BatchDesc> batches = config_.constraints;
  if (config_.typical_step) batches.push_back(*config_.typical_step);
  std::int64_t step = 0;
  for (const BatchDesc& batch : batches) {
    for (const KvCacheDesc& request : batch.kv_caches) {
      step = std::max<std::int64_t>(step, request.capacity - request.history_length);
    }
  }
  return step <= 1 ? 0 : round_up<std::int64_t>(step, config_.tokens_per_block);
}

// On the way to `length` tokens. Within a step of a prefill the slots never fall, since a page more
// puts at most one more in scratch; nor do they from the end of one step to that of the next, by
// which at most as many pages become stale or scratch as are written. So the page at hand and the
// last one of the step before it stand for all. A length between page borders needs no more than
// the one behind the border.
std::int64_t StorageLayout::most_slots(std::int32_t layer_group, std::int32_t length,
                                       std::int64_t step) const {
  const LifeCycle& life_cycle = layer_groups_[static_cast<std::size_t>(layer_group)].life_cycle;
  const std::int32_t page = config_.tokens_per_block;
  const std::int64_t decoding = most_pages(life_cycle, page, length);
  if (step == 0 || length == 0 || !life_cycle.sliding_window_size) return decoding;
  const std::int32_t last = (length - 1) / page * page;
  const auto history = static_cast<std::int32_t>(last / step * step);
  const std::int64_t now = count_slots_of(layer_group, {{{last + 1, history}}, 0});
  if (history == 0) return std::max(decoding, now);
  const KvCacheDesc before{history - page + 1, static_cast<std::int32_t>(history - step)};
  return std::max({decoding, now, count_slots_of(layer_group, {{before}, 0})});
}

std::int32_t StorageLayout::clamp_max_seq_len(const std::vector<std::int64_t>& totals,
                                              std::int32_t batch_size, std::int32_t upper) const {
  constexpr const char* kFunction = "StorageLayout.clamp_max_seq_len";
  if (batch_size < 1) fail_argument(kFunction, "batch_size must be >= 1, got ", batch_size);
  if (upper < 0) fail_argument(kFunction, "upper must be >= 0, got ", upper);
  if (totals.size() != pool_groups_.size()) {
    fail_argument(kFunction, "totals must have one element per pool group, ", pool_groups_.size(),
                  ", got ", totals.size());
  }
  const std::int64_t step = prefill_step();
  auto batch_fits = [&](std::int32_t length) {
    for (std::size_t g = 0; g < pool_groups_.size(); ++g) {
      const PoolGroupDesc& pools = pool_groups_[g];
      std::int64_t slots = 0;
      for (const std::int32_t id : pools.layer_groups) {
        slots += batch_size - 1 + most_slots(id, length, step);
      }
      if (!pools.is_cold && !fits(slots, totals[g], config_.max_util_for_resume)) return false;
    }
    return true;
  };
  std::int32_t low = 0;
  std::int32_t high = upper;
  while (low < high) {
    const std::int32_t middle = high - (high - low) / 2;
    if (batch_fits(middle)) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

}  // namespace sparse_kvcm
