#include "sparse_kvcm/page_index.hpp"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "core/check.hpp"
#include "core/rounding.hpp"

namespace sparse_kvcm {
namespace {

constexpr const char* kFunction = "PageIndexConverter.convert";

void check_sizes(const PageIndexConverter& converter, std::size_t num_pages,
                 const ScratchPages& scratch, std::size_t num_indices) {
  if (num_indices != num_pages * static_cast<std::size_t>(converter.expansion)) {
    fail_argument(kFunction, "indices must have ", converter.expansion, " per page, so ",
                  num_pages * static_cast<std::size_t>(converter.expansion), ", got ", num_indices);
  }
  if (scratch.pages.size() == 0) return;
  if (converter.mode == PageIndexMode::kShared) {
    fail_argument(kFunction, "scratch pages need mode PER_LAYER, got SHARED");
  }
  if (scratch.pages.begin < 0 || scratch.pages.size() < 0 ||
      static_cast<std::size_t>(scratch.pages.end) > num_pages) {
    fail_argument(kFunction, "scratch pages must be within the table's ", num_pages, ", got [",
                  scratch.pages.begin, ", ", scratch.pages.end, ")");
  }
  const std::int32_t needed = converter.scratch_slots(scratch.pages.size());
  if (std::cmp_less(scratch.slots.size(), needed)) {
    fail_argument(kFunction, "scratch slots must be >= ", needed, " for ", scratch.pages.size(),
                  " pages, got ", scratch.slots.size());
  }
}

// Every index that a slot gives has 32 bits.
void check_slot(const PageIndexConverter& converter, const char* name, std::int32_t slot) {
  constexpr std::int64_t kIndices = std::int64_t{1} << 31;
  const std::int64_t per_slot = std::int64_t{converter.scale} * converter.expansion;
  if (slot == kBadPageIndex || (slot >= 0 && slot < kIndices / per_slot)) return;
  fail_argument(kFunction, name, " must be -1 or in [0, ", kIndices / per_slot, "), got ", slot);
}

// `page`: of this buffer's size, counted from the pool's beginning.
void expand(std::int32_t page, std::int32_t expansion, std::int32_t* indices) {
  for (std::int32_t u = 0; u < expansion; ++u) indices[u] = page * expansion + u;
}

}  // namespace

void PageIndexConverter::convert(std::int32_t base_index, std::int32_t* indices) const {
  check_slot(*this, "base_index", base_index);
  if (base_index == kBadPageIndex) {
    std::fill_n(indices, expansion, kBadPageIndex);
    return;
  }
  const std::int32_t offset = mode == PageIndexMode::kPerLayer ? position : 0;
  expand(base_index * scale + offset, expansion, indices);
}

void PageIndexConverter::convert(std::span<const std::int32_t> base, const ScratchPages& scratch,
                                 std::span<std::int32_t> indices) const {
  check_sizes(*this, base.size(), scratch, indices.size());
  for (const std::int32_t slot : base) check_slot(*this, "base indices", slot);
  for (const std::int32_t slot : scratch.slots) check_slot(*this, "scratch slots", slot);
  std::int32_t* out = indices.data();
  for (std::int32_t page = 0; std::cmp_less(page, base.size()); ++page, out += expansion) {
    if (!scratch.pages.contains(page)) {
      convert(base[static_cast<std::size_t>(page)], out);
      continue;
    }
    const ScratchEntry entry = get_scratch_entry(page - scratch.pages.begin);
    const std::int32_t slot = scratch.slots[static_cast<std::size_t>(entry.slot_index)];
    expand(slot * scale + entry.position, expansion, out);
  }
}

std::int32_t PageIndexConverter::base_index_of(std::int32_t index) const {
  return index == kBadPageIndex ? kBadPageIndex : index / expansion / scale;
}

ScratchEntry PageIndexConverter::get_scratch_entry(std::int32_t scratch_page) const {
  const std::int32_t pages_per_slot = scale / scratch_pages_per_page;
  const std::int32_t turn = scratch_page % pages_per_slot * scratch_pages_per_page;
  return {scratch_page / pages_per_slot, (turn + position) % scale};
}

std::int32_t PageIndexConverter::scratch_slots(std::int32_t num_pages) const {
  return ceil_div(num_pages, scale / scratch_pages_per_page);
}

}  // namespace sparse_kvcm
