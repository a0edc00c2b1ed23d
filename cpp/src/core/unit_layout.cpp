#include "sparse_kvcm/unit_layout.hpp"

#include <algorithm>
#include <numeric>
#include <tuple>
#include <utility>

#include "core/check.hpp"
#include "core/rounding.hpp"
#include "sparse_kvcm/types.hpp"

namespace sparse_kvcm {
namespace {

constexpr std::int32_t kMaxRegions = 4;
constexpr std::int32_t kMaxRegionBytes = 65'536;
constexpr std::int32_t kMaxPageAlignment = 65'536;
constexpr std::int32_t kWidestAccess = 16;

void check_units_per_page(const char* function, std::int32_t units_per_page) {
  if (units_per_page < 1) {
    fail_argument(function, "units_per_page must be >= 1, got ", units_per_page);
  }
}

}  // namespace

UnitLayout::UnitLayout(std::vector<std::int32_t> region_bytes, std::int32_t page_alignment)
    : region_bytes_(std::move(region_bytes)), page_alignment_(page_alignment) {
  if (region_bytes_.empty() || region_bytes_.size() > kMaxRegions) {
    fail_argument("UnitLayout", "region_bytes must have 1 to ", kMaxRegions, " regions, got ",
                  region_bytes_.size());
  }
  for (std::size_t region = 0; region < region_bytes_.size(); ++region) {
    const std::int32_t bytes = region_bytes_[region];
    if (bytes < 4 || bytes > kMaxRegionBytes || bytes % 4 != 0) {
      fail_argument("UnitLayout", "region_bytes[", region, "] must be a multiple of 4 in [4, ",
                    kMaxRegionBytes, "], got ", bytes);
    }
  }
  if (page_alignment < 1 || page_alignment > kMaxPageAlignment) {
    fail_argument("UnitLayout", "page_alignment must be in [1, ", kMaxPageAlignment, "], got ",
                  page_alignment);
  }
}

std::int64_t UnitLayout::unit_bytes() const {
  return std::accumulate(region_bytes_.begin(), region_bytes_.end(), std::int64_t{0});
}

std::int64_t UnitLayout::page_bytes(std::int32_t units_per_page) const {
  check_units_per_page("UnitLayout.page_bytes", units_per_page);
  return round_up(unit_bytes() * units_per_page, std::int64_t{page_alignment_});
}

std::int64_t UnitLayout::region_offset(std::int32_t region, std::int32_t units_per_page) const {
  check_units_per_page("UnitLayout.region_offset", units_per_page);
  if (region < 0 || region >= num_regions()) {
    fail_argument("UnitLayout.region_offset", "region must be in [0, ", num_regions(), "), got ",
                  region);
  }
  return units_per_page *
         std::accumulate(region_bytes_.begin(), region_bytes_.begin() + region, std::int64_t{0});
}

std::int32_t natural_alignment(std::int32_t bytes) {
  std::int32_t alignment = kWidestAccess;
  while (bytes % alignment != 0) alignment /= 2;
  return alignment;
}

HostRowLayout pack_host_row(const UnitLayout& layout, std::int32_t num_members) {
  const std::int32_t max_members = kMaxPieces / layout.num_regions();
  if (num_members < 1 || num_members > max_members) {
    fail_argument("pack_host_row", "num_members must be in [1, ", max_members, "] with ",
                  layout.num_regions(), " regions, got ", num_members);
  }
  HostRowLayout row;
  for (std::int32_t member = 0; member < num_members; ++member) {
    for (std::int32_t region = 0; region < layout.num_regions(); ++region) {
      const auto bytes = layout.region_bytes()[static_cast<std::size_t>(region)];
      row.pieces.push_back({member, region, bytes, 0});
    }
  }
  // Falling alignment leaves every piece aligned to its own width without gaps.
  std::ranges::sort(row.pieces, {}, [](const HostPiece& piece) {
    return std::tuple(-natural_alignment(piece.bytes), piece.member, piece.region);
  });
  std::int32_t end = 0;
  for (HostPiece& piece : row.pieces) {
    piece.offset = end;
    end += piece.bytes;
  }
  row.unit_bytes = round_up(end, kWidestAccess);
  return row;
}

}  // namespace sparse_kvcm
