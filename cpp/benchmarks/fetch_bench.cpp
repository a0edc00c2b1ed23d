// Copies between host history and the arena: fetch of a launch's misses, and flush. GLM-5's shape:
// groups of four member layers, pages of 64 units, 13 % of K missed.
// The limit is a plain copy of the same bytes.
#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "array.hpp"
#include "bench.hpp"
#include "sparse_kvcm/ops.hpp"
#include "sparse_kvcm/unit_layout.hpp"

namespace sparse_kvcm::bench {
namespace {

constexpr std::int32_t kMembers = 4;
constexpr std::int32_t kUnitsPerPage = 64;
constexpr std::int32_t kRows = 16;
constexpr std::int32_t kPagesPerRow = 256;
constexpr std::int32_t kMisses = 266;      // per row
constexpr std::int32_t kFlushed = 20'000;  // far more than a step's, so that no cache holds them
constexpr std::int32_t kArenaPages = kRows * 4'096 / kUnitsPerPage;
constexpr std::int32_t kNumSlots = kArenaPages * kUnitsPerPage;
constexpr std::int32_t kHostPages = kRows * kPagesPerRow;

class Group {
 public:
  Group(Backend& backend, const UnitLayout& layout)
      : host_row_(pack_host_row(layout, kMembers)),
        host_(backend.allocate_pinned(
            static_cast<std::size_t>(host_row_.unit_bytes * kUnitsPerPage * kHostPages))) {
    const std::int64_t page_bytes = layout.page_bytes(kUnitsPerPage);
    for (std::int32_t member = 0; member < kMembers; ++member) {
      arenas_.push_back(
          backend.allocate_device(static_cast<std::size_t>(page_bytes * kArenaPages)));
    }
    for (const HostPiece& piece : host_row_.pieces) {
      pieces_.push_back({arenas_[static_cast<std::size_t>(piece.member)]->device_data() +
                             layout.region_offset(piece.region, kUnitsPerPage),
                         page_bytes, piece.bytes, piece.offset});
    }
    // Pages that were never written would cost nothing to read.
    std::fill_n(host_->data(), host_->bytes(), std::byte{1});
  }

  [[nodiscard]] ops::GroupMemory memory() const {
    return {pieces_,   host_->device_data(), host_row_.unit_bytes, kHostPages,
            kNumSlots, kUnitsPerPage};
  }

 private:
  HostRowLayout host_row_;
  BufferPtr host_;
  std::vector<BufferPtr> arenas_;
  std::vector<ops::Piece> pieces_;
};

std::vector<std::int32_t> numbers_to(std::int32_t n) {
  std::vector<std::int32_t> numbers(static_cast<std::size_t>(n));
  std::iota(numbers.begin(), numbers.end(), 0);
  return numbers;
}

// For each row, `count` different numbers of [0, n), ascending, plus row * step.
std::vector<std::int32_t> scattered(std::int32_t n, std::int32_t count, std::int32_t step) {
  std::mt19937 random(1);
  const std::vector<std::int32_t> all = numbers_to(n);
  std::vector<std::int32_t> chosen;
  for (std::int32_t row = 0; row < kRows; ++row) {
    const auto first = static_cast<std::ptrdiff_t>(chosen.size());
    std::sample(all.begin(), all.end(), std::back_inserter(chosen), count, random);
    std::for_each(chosen.begin() + first, chosen.end(), [=](auto& x) { x += row * step; });
  }
  return chosen;
}

Measurement fetch(Context& context, const UnitLayout& layout) {
  context.require(DeviceKind::kCpu);  // the GPU's cases are in cuda/
  Backend& backend = *backend_for(context.device());
  const Group group(backend, layout);
  const RowState seat{.lease_id = 0, .watermark = kPagesPerRow * kUnitsPerPage};
  const Array rows(backend, numbers_to(kRows));
  const Array row_states(backend, std::vector<RowState>(kRows, seat));
  const Array ordinals(backend, scattered(kPagesPerRow * kUnitsPerPage, kMisses, 0));
  const Array slots(backend, scattered(4'096, kMisses, 4'096));
  const Array counts(backend, std::vector<std::int32_t>(kRows, kMisses));
  const Array page_table(backend, numbers_to(kRows * kPagesPerRow));
  const Array errors(backend, std::vector<std::uint32_t>(kRows));
  ops::FetchParams params;
  params.launch = {rows.data(), kRows, row_states.data(), kRows};
  params.miss_ordinals = ordinals.data();
  params.miss_slots = slots.data();
  params.miss_counts = counts.data();
  params.k = kMisses;
  params.page_table = page_table.data();
  params.max_pages = kPagesPerRow;
  params.memory = group.memory();
  params.errors.errors = errors.data();
  const double seconds = context.median_seconds([&] { ops::fetch(context.device(), params, 0); });
  const double bytes =
      double{kRows} * kMisses * kMembers * static_cast<double>(layout.unit_bytes());
  return rate_gb_per_s(bytes / seconds, context.copy_rate());
}

Measurement flush(Context& context, const UnitLayout& layout) {
  context.require(DeviceKind::kCpu);
  Backend& backend = *backend_for(context.device());
  const Group group(backend, layout);
  std::vector<ops::UnitMove> moves;
  moves.reserve(kFlushed);
  for (std::int32_t i = 0; i < kFlushed; ++i) moves.push_back({std::int64_t{i} * 13, i * 3});
  const std::vector<ops::GroupMemory> groups{group.memory()};
  const ops::MoveParams params{moves, groups, ops::MoveDirection::kArenaToHost};
  const double seconds =
      context.median_seconds([&] { ops::move_units(context.device(), params, 0); });
  const double bytes =
      static_cast<double>(moves.size()) * kMembers * static_cast<double>(layout.unit_bytes());
  return rate_gb_per_s(bytes / seconds, context.copy_rate());
}

const Registration kFetch("fetch", "b16_266_misses_4x1152B",
                          [](Context& context) { return fetch(context, UnitLayout({1'152})); });
const Registration kFetchV4("fetch", "b16_266_misses_4x576B_8B", [](Context& context) {
  return fetch(context, UnitLayout({576, 8}, 576));
});
const Registration kFlush("flush", "20000_units_4x1152B",
                          [](Context& context) { return flush(context, UnitLayout({1'152})); });

}  // namespace
}  // namespace sparse_kvcm::bench
