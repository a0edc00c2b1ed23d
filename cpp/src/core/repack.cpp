// Units outside, pieces inside: one stream of writes in the order of addresses, and as many streams
// of reads, each in order too, as a row has pieces. Hardware prefetchers follow both.
//
// Rows leave by streaming stores; with plain ones each line would be read before it is written, and
// V4's rows took 1.6 times as long (`scripts/bench repack`). Pieces of a multiple of 16 B come
// first in a row, so they can go in steps of 16; the others, a footer or scales, go in steps of 4.
// To put those together in a buffer would take longer: a load of what has just been stored in
// smaller parts waits until all stores before it are done.
#include "core/repack.hpp"

#include <algorithm>
#include <array>

#include "core/stream_copy.hpp"

namespace sparse_kvcm {
namespace {

constexpr std::array<std::byte, 16> kZeros{};

void write_row(const HostRowLayout& row, std::span<const PieceSource> sources, std::int64_t page,
               std::int64_t unit, std::byte* out) {
  std::int64_t end = 0;
  for (std::size_t p = 0; p < sources.size(); ++p) {
    const HostPiece& piece = row.pieces[p];
    const std::byte* from =
        sources[p].data + page * sources[p].page_stride + unit * sources[p].unit_stride;
    if (piece.bytes % 16 == 0) {
      stream_by_16(out + end, from, piece.bytes);
    } else {
      stream_by_4(out + end, from, piece.bytes);
    }
    end += piece.bytes;  // pieces lie side by side
  }
  stream_by_4(out + end, kZeros.data(), row.unit_bytes - end);
}

}  // namespace

void repack(const HostRowLayout& row, std::span<const PieceSource> sources,
            std::int32_t units_per_page, std::int64_t first, std::int64_t num_units,
            std::byte* rows) {
  const std::int64_t end = first + num_units;
  for (std::int64_t page = first / units_per_page; first < end; ++page) {
    const std::int64_t begin = page * units_per_page;
    const std::int64_t last = std::min(end, begin + units_per_page);
    for (; first < last; ++first, rows += row.unit_bytes) {
      write_row(row, sources, page, first - begin, rows);
    }
  }
  stream_fence();
}

}  // namespace sparse_kvcm
