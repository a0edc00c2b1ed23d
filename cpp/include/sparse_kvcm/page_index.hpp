// From the slots in a request's page table to the page indices that kernels take.
//
// A slot holds one page of every buffer of its layer group. Buffers of equal size lie side by side
// in it (they are *coalesced*), so that a pool is an array of pages of that size: `scale` pages per
// slot, this buffer the one at `position`, each cut into `expansion` pages as kernels see them.
//
//   SHARED     index = base * scale,            from an address that has the position in it: one
//              converted table serves all layers of the group
//   PER_LAYER  index = base * scale + position, from the beginning of the pool
//
// and kernel page u of it is index * expansion + u. A base index of -1 gives -1 throughout.
// Immutable, so thread-safe.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sparse_kvcm/page_range.hpp"

namespace sparse_kvcm {

inline constexpr std::int32_t kBadPageIndex = -1;

enum class PageIndexMode : std::uint8_t { kShared = 0, kPerLayer = 1 };

// The scratch of one request and layer group: page `pages.begin + p` is the p-th scratch page.
struct ScratchPages {
  PageRange pages;
  std::vector<std::int32_t> slots;  // what they share
};

// Where a scratch page of one buffer lies.
struct ScratchEntry {
  std::int32_t slot_index = 0;  // into ScratchPages::slots
  std::int32_t position = 0;    // of the page within the slot, in [0, scale)
  friend bool operator==(const ScratchEntry&, const ScratchEntry&) = default;
};

struct PageIndexConverter {
  std::int32_t scale = 1;      // pages of this size per slot
  std::int32_t expansion = 1;  // kernel pages per page
  std::int32_t position = 0;   // of this buffer within its slot, in [0, scale)
  // Pages that one layer may need at once per scratch page, in [1, scale].
  std::int32_t scratch_pages_per_page = 1;
  PageIndexMode mode = PageIndexMode::kShared;

  // The kernel pages of one page: writes [expansion] indices. Throws InvalidArgument unless
  // base_index is -1 or gives indices of 32 bits.
  void convert(std::int32_t base_index, std::int32_t* indices) const;

  // The kernel pages of a page table: base [n] to indices [n, expansion]. Where `scratch` says so
  // the page is looked up in it, whatever the base index says. Throws InvalidArgument if sizes do
  // not match, if scratch is not empty in mode SHARED (where a page lies depends on the layer), or
  // if there are fewer scratch slots than scratch_slots(), or for an index as above; nothing is
  // written then.
  void convert(std::span<const std::int32_t> base, const ScratchPages& scratch,
               std::span<std::int32_t> indices) const;

  // The slot of a kernel page index that convert gave; -1 for -1. The way from one layer's table to
  // another's: convert(base_index_of(...)) with the other's converter.
  [[nodiscard]] std::int32_t base_index_of(std::int32_t index) const;

  // Where the p-th scratch page of this buffer lies. The only place that knows.
  //
  // While one layer runs, each of its pages has a place of its own. floor(scale /
  // scratch_pages_per_page) scratch pages share a slot; where that division is even it is the
  // field's formula, t = p * q, slot t / scale, position (t mod scale + position) mod scale.
  [[nodiscard]] ScratchEntry get_scratch_entry(std::int32_t scratch_page) const;

  // Slots that `num_pages` scratch pages of this buffer share.
  [[nodiscard]] std::int32_t scratch_slots(std::int32_t num_pages) const;

  friend bool operator==(const PageIndexConverter&, const PageIndexConverter&) = default;
};

}  // namespace sparse_kvcm
