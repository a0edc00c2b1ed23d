// Received pages, layer by layer, into host rows, on one core; bytes are those of the pages. The
// limit is a plain copy of as many.
#include <cstdint>
#include <vector>

#include "bench.hpp"
#include "core/repack.hpp"

namespace sparse_kvcm::bench {
namespace {

constexpr std::int64_t kBytes = std::int64_t{256} << 20;

Measurement repack_pages(Context& context, const UnitLayout& layout, std::int32_t members,
                         std::int32_t units_per_page) {
  context.require(DeviceKind::kCpu);
  const HostRowLayout row = pack_host_row(layout, members);
  const std::int64_t page_bytes = layout.page_bytes(units_per_page);
  const std::int64_t pages = kBytes / (page_bytes * members);
  const std::vector<std::byte> source(static_cast<std::size_t>(pages * members * page_bytes),
                                      std::byte{1});
  std::vector<PieceSource> sources;
  for (const HostPiece& piece : row.pieces) {
    sources.push_back({source.data() + piece.member * page_bytes +
                           layout.region_offset(piece.region, units_per_page),
                       piece.bytes, members * page_bytes});
  }
  const std::int64_t units = pages * units_per_page;
  std::vector<std::byte> rows(static_cast<std::size_t>(units * row.unit_bytes));
  const double seconds =
      context.median_seconds([&] { repack(row, sources, units_per_page, 0, units, rows.data()); });
  const auto bytes = static_cast<double>(units * members * layout.unit_bytes());
  return rate_gb_per_s(bytes / seconds, context.copy_rate());
}

const Registration kGlm("repack", "glm_4x576_page64", [](Context& context) {
  return repack_pages(context, UnitLayout({576}), 4, 64);
});
const Registration kV4("repack", "v4_584_page32", [](Context& context) {
  return repack_pages(context, UnitLayout({576, 8}, 576), 1, 32);
});
const Registration kV4Large("repack", "v4_584_page64", [](Context& context) {
  return repack_pages(context, UnitLayout({576, 8}, 576), 1, 64);
});

}  // namespace
}  // namespace sparse_kvcm::bench
