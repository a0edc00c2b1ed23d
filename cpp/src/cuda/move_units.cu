// One warp per unit and group. Moves, groups and pieces travel as kernel parameters, as many as
// fit, so nothing is staged and the caller's arrays may go when the call returns.
#include <algorithm>
#include <cstddef>

#include "cuda/copy_group.hpp"
#include "cuda/device/unit_copy.cuh"
#include "cuda/error.hpp"
#include "cuda/kernels.hpp"
#include "cuda/launch.hpp"

namespace sparse_kvcm {
namespace {

using device::kWarpSize;

constexpr int kThreads = 256;
constexpr std::int32_t kMovesAtOnce = 512;
constexpr std::int32_t kGroupsAtOnce = 64;
constexpr std::int32_t kPiecesAtOnce = 256;

struct MoveLaunch {
  std::int32_t num_moves = 0;
  std::int32_t num_groups = 0;
  std::int64_t host_units[kMovesAtOnce];
  std::int32_t slots[kMovesAtOnce];
  device::CopyGroup groups[kGroupsAtOnce];
  device::CopyPiece pieces[kPiecesAtOnce];
};
static_assert(sizeof(MoveLaunch) <= 32'764, "kernel parameters, CUDA 12.1 and later");
static_assert(kMaxPieces <= kPiecesAtOnce, "every group fits a launch");

template <ops::MoveDirection kDirection>
__global__ void __launch_bounds__(kThreads)
    move_units_kernel(const __grid_constant__ MoveLaunch p) {
  const std::uint32_t num_items = static_cast<std::uint32_t>(p.num_moves * p.num_groups);
  const std::uint32_t num_warps = gridDim.x * (kThreads / kWarpSize);
  const std::uint32_t warp = threadIdx.x / kWarpSize * gridDim.x + blockIdx.x;
  for (std::uint32_t item = warp; item < num_items; item += num_warps) {
    const device::CopyGroup& group = p.groups[item / static_cast<std::uint32_t>(p.num_moves)];
    const std::uint32_t move = item % static_cast<std::uint32_t>(p.num_moves);
    const device::CopyPiece* pieces = p.pieces + group.first_piece;
    device::copy_unit<kDirection>(group, pieces, p.host_units[move], p.slots[move], [] {});
  }
}

void launch(const MoveLaunch& p, ops::MoveDirection direction, cudaStream_t stream) {
  constexpr std::int64_t kWarps = kThreads / kWarpSize;
  const std::int64_t items = static_cast<std::int64_t>(p.num_moves) * p.num_groups;
  const unsigned blocks = num_blocks(items, kWarps);
  if (direction == ops::MoveDirection::kArenaToHost) {
    move_units_kernel<ops::MoveDirection::kArenaToHost><<<blocks, kThreads, 0, stream>>>(p);
  } else {
    move_units_kernel<ops::MoveDirection::kHostToArena><<<blocks, kThreads, 0, stream>>>(p);
  }
  SPARSE_KVCM_CUDA_CHECK(cudaGetLastError());
}

// Fills in groups from `first` on, as many as fit. Returns the next one.
std::size_t take_groups(std::span<const ops::GroupMemory> groups, std::size_t first,
                        MoveLaunch& p) {
  std::int32_t num_pieces = 0;
  p.num_groups = 0;
  while (first < groups.size() && p.num_groups < kGroupsAtOnce &&
         num_pieces + static_cast<std::int32_t>(groups[first].pieces.size()) <= kPiecesAtOnce) {
    p.groups[p.num_groups++] = make_copy_group(groups[first], p.pieces + num_pieces, num_pieces);
    num_pieces += static_cast<std::int32_t>(groups[first].pieces.size());
    ++first;
  }
  return first;
}

}  // namespace

void launch_move_units(const ops::MoveParams& params, cudaStream_t stream) {
  MoveLaunch p;
  for (std::size_t group = 0; group < params.groups.size();) {
    group = take_groups(params.groups, group, p);
    for (std::size_t first = 0; first < params.moves.size(); first += kMovesAtOnce) {
      const auto moves = params.moves.subspan(
          first, std::min<std::size_t>(kMovesAtOnce, params.moves.size() - first));
      p.num_moves = static_cast<std::int32_t>(moves.size());
      for (std::size_t m = 0; m < moves.size(); ++m) {
        p.host_units[m] = moves[m].host_unit;
        p.slots[m] = moves[m].slot;
      }
      launch(p, params.direction, stream);
    }
  }
}

}  // namespace sparse_kvcm
