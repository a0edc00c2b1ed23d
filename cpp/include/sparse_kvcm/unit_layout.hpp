// How the bytes of a unit lie in the arena and in host history.
//
// Arena, per member layer: [pages, page_bytes]. Within a page all units' region 0 come first, then
// all units' region 1 and so on, each region densely packed: what attention kernels read. The page
// is rounded up to a multiple of `page_alignment`.
//
// Host history, per selection group: [pages, units_per_page, host_unit_bytes]. The pieces (member
// layers times regions) of one unit lie side by side, by falling alignment, then member, then
// region; the row is rounded up to 16 B. So one contiguous read feeds every member layer.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace sparse_kvcm {

// The bytes of one unit in one member layer. Immutable after construction, so thread-safe.
class UnitLayout {
 public:
  // `region_bytes`: bytes per unit of each region, e.g. {656}, {288, 36}, {576, 8}.
  // `page_alignment`: arena pages are rounded up to a multiple of it, in bytes (576 for V4's
  // 576 + 8 rows, else 1).
  // Throws InvalidArgument unless there are 1 to 4 regions, each a multiple of 4 in [4, 65536],
  // and page_alignment is in [1, 65536].
  explicit UnitLayout(std::vector<std::int32_t> region_bytes, std::int32_t page_alignment = 1);

  [[nodiscard]] const std::vector<std::int32_t>& region_bytes() const { return region_bytes_; }
  [[nodiscard]] std::int32_t page_alignment() const { return page_alignment_; }
  [[nodiscard]] std::int32_t num_regions() const {
    return static_cast<std::int32_t>(region_bytes_.size());
  }
  // Bytes of one unit in one member layer, all regions.
  [[nodiscard]] std::int64_t unit_bytes() const;
  // Bytes of one arena page of one member layer.
  [[nodiscard]] std::int64_t page_bytes(std::int32_t units_per_page) const;
  // Where `region` begins within an arena page, in bytes.
  // Both throw InvalidArgument if units_per_page < 1, this one for an unknown region too.
  [[nodiscard]] std::int64_t region_offset(std::int32_t region, std::int32_t units_per_page) const;

  friend bool operator==(const UnitLayout&, const UnitLayout&) = default;

 private:
  std::vector<std::int32_t> region_bytes_;
  std::int32_t page_alignment_;
};

// The largest power of two, at most 16, that divides `bytes`: the widest access that a dense array
// of such rows allows.
[[nodiscard]] std::int32_t natural_alignment(std::int32_t bytes);

// One piece of a host unit row.
struct HostPiece {
  std::int32_t member = 0;  // index into the group's member layers
  std::int32_t region = 0;
  std::int32_t bytes = 0;
  std::int32_t offset = 0;  // within the host unit row, in bytes
  friend bool operator==(const HostPiece&, const HostPiece&) = default;
};

// The packed host row of one selection group.
struct HostRowLayout {
  std::vector<HostPiece> pieces;  // in the order in which they lie
  std::int64_t unit_bytes = 0;    // stride from unit to unit, a multiple of 16
};

// Packs `num_members` member layers of one layout into a host row.
// Throws InvalidArgument if num_members < 1 or there would be more than kMaxPieces pieces.
[[nodiscard]] HostRowLayout pack_host_row(const UnitLayout& layout, std::int32_t num_members);

}  // namespace sparse_kvcm
