// One launch per selection group. The misses of all rows form one list, request-major; few warps
// walk it side by side, a unit each, so that what is in flight at a time lies close together in
// host memory: address translation, not bandwidth, is what single rows of a large history run out
// of. How many warps is measured per row size (tuning.hpp).
//
// Each block numbers the list for itself, kRowsAtOnce rows at a time.
#include <algorithm>

#include "cuda/copy_group.hpp"
#include "cuda/device/block_scan.cuh"
#include "cuda/device/seat.cuh"
#include "cuda/device/unit_copy.cuh"
#include "cuda/error.hpp"
#include "cuda/kernels.hpp"

namespace sparse_kvcm {
namespace {

using device::kFullWarp;
using device::kWarpSize;

constexpr int kThreads = 256;
constexpr int kRowsAtOnce = 2048;

// What the kernel needs of ops::FetchParams. Lives in the launch's constant parameters.
struct FetchLaunch {
  ops::LaunchRows launch;
  const StepState* step;
  const std::int32_t* miss_ordinals;
  const std::int32_t* miss_slots;
  const std::int32_t* miss_counts;
  std::int32_t k;
  const std::int32_t* page_table;
  std::int64_t max_pages;
  std::int64_t num_slots;
  std::int64_t num_host_pages;
  ops::LaunchErrors errors;
  FetchTuning tuning;
  device::CopyGroup group;
  device::CopyPiece pieces[kMaxPieces];
};

__device__ std::int32_t seat_of(const FetchLaunch& p, std::int64_t i) {
  return device::find_seat(p.launch.rows[i], p.launch.row_states, p.launch.num_rows);
}

__device__ void report(const FetchLaunch& p, std::int64_t i, std::uint32_t bits) {
  device::raise(p.errors.errors + i, bits);
  if (p.errors.row_errors != nullptr) {
    device::raise(p.errors.row_errors + p.launch.rows[i], bits);
  }
}

// Histories are summed in this many units, so that 32 bits hold the sum.
constexpr std::int32_t kScaleUnits = 64;

struct MissList {
  std::uint32_t size = 0;
  std::int64_t units = 0;  // of the histories that the misses come from
};

// ends[j]: misses of launch positions first .. first + j, in the list of this pass.
__device__ MissList number_misses(const FetchLaunch& p, std::int32_t first, std::int32_t rows,
                                  std::uint32_t* ends, std::uint32_t* warp_totals) {
  MissList list;
  for (std::int32_t begin = 0; begin < rows; begin += kThreads) {
    const std::int32_t j = begin + static_cast<std::int32_t>(threadIdx.x);
    std::uint32_t misses = 0;
    std::uint32_t history = 0;
    if (j < rows) {
      const std::int32_t seat = seat_of(p, first + j);
      if (seat >= 0) {
        if (p.step != nullptr && p.step->open == 0) {
          if (blockIdx.x == 0) report(p, first + j, kErrorStale);
        } else {
          misses = static_cast<std::uint32_t>(min(max(p.miss_counts[first + j], 0), p.k));
        }
        history = misses == 0 ? 0 : max(p.launch.row_states[seat].watermark, 0) / kScaleUnits;
      } else if (seat == device::kNoSeat && blockIdx.x == 0) {
        device::raise(p.errors.batch_error, kBatchErrorRow);
      }
    }
    const std::uint32_t below_in_warp = device::begin_block_scan(misses, warp_totals);
    const std::uint32_t warp_history = __reduce_add_sync(kFullWarp, history);
    if (threadIdx.x % kWarpSize == 0)
      warp_totals[kWarpSize + threadIdx.x / kWarpSize] = warp_history;
    __syncthreads();
    const device::BlockSums sums = device::end_block_scan<kThreads>(below_in_warp, warp_totals);
    list.units += kScaleUnits *
                  std::int64_t{device::end_block_scan<kThreads>(0, warp_totals + kWarpSize).total};
    if (j < rows) ends[j] = list.size + sums.below + misses;
    list.size += sums.total;
    __syncthreads();
  }
  return list;
}

// The first j with item < ends[j], from `j` on; the whole warp looks.
__device__ std::int32_t find_row(const std::uint32_t* ends, std::int32_t rows, std::int32_t j,
                                 std::uint32_t item) {
  const auto lane = static_cast<std::int32_t>(threadIdx.x) % kWarpSize;
  for (;; j += kWarpSize) {
    const bool behind = j + lane < rows && item >= ends[j + lane];
    const int passed = __popc(__ballot_sync(kFullWarp, behind));
    if (passed < kWarpSize) return j + passed;
  }
}

// Copies miss `m` of launch position `i`.
__device__ void fetch_unit(const FetchLaunch& p, std::int64_t i, std::int64_t m) {
  const std::int32_t ordinal = p.miss_ordinals[i * p.k + m];
  const std::int32_t slot = p.miss_slots[i * p.k + m];
  const std::int32_t row = p.launch.rows[i];
  std::uint32_t error = 0;
  std::int64_t page = kNoPage;
  if (ordinal < 0) {
    error = kErrorRange;
  } else if (ordinal >= p.launch.row_states[row].watermark) {
    error = kErrorHole;
  } else if (slot < 0 || slot >= p.num_slots) {
    error = kErrorLease;
  } else {
    const std::int32_t column = ordinal / p.group.units_per_page;
    if (column < p.max_pages) page = p.page_table[row * p.max_pages + column];
    if (page < 0 || page >= p.num_host_pages) error = kErrorPage;
  }
  if (error != 0) {
    if (threadIdx.x % kWarpSize == 0) report(p, i, error);
    return;
  }
  const std::int64_t unit = page * p.group.units_per_page + ordinal % p.group.units_per_page;
  device::load_unit(p.group, p.pieces, unit, slot);
}

// Warps that walk the list: fewer where its units lie far apart.
__device__ std::uint32_t walkers(const FetchLaunch& p, const MissList& list) {
  const bool sparse =
      list.units * p.group.host_unit_bytes > std::int64_t{p.tuning.sparse_bytes} * list.size;
  return static_cast<std::uint32_t>(sparse ? p.tuning.sparse : p.tuning.dense);
}

__global__ void __launch_bounds__(kThreads) fetch_kernel(const __grid_constant__ FetchLaunch p) {
  __shared__ std::uint32_t ends[kRowsAtOnce];
  __shared__ std::uint32_t warp_totals[2 * kWarpSize];
  const std::uint32_t warp = threadIdx.x / kWarpSize * gridDim.x + blockIdx.x;
  for (std::int32_t first = 0; first < p.launch.b; first += kRowsAtOnce) {
    const std::int32_t rows = min(p.launch.b - first, kRowsAtOnce);
    const MissList list = number_misses(p, first, rows, ends, warp_totals);
    const std::uint32_t num_warps = walkers(p, list);
    std::int32_t j = 0;
    for (std::uint32_t item = warp; warp < num_warps && item < list.size; item += num_warps) {
      j = find_row(ends, rows, j, item);
      fetch_unit(p, first + j, item - (j == 0 ? 0 : ends[j - 1]));
    }
    __syncthreads();
  }
}

}  // namespace

void launch_fetch(const ops::FetchParams& params, const FetchTuning& tuning, cudaStream_t stream) {
  FetchLaunch p{params.launch,
                params.step,
                params.miss_ordinals,
                params.miss_slots,
                params.miss_counts,
                params.k,
                params.page_table,
                params.max_pages,
                params.memory.num_slots,
                params.memory.num_host_pages,
                params.errors,
                tuning,
                {},
                {}};
  p.group = make_copy_group(params.memory, p.pieces, 0);
  const std::int32_t warps = std::max(tuning.dense, tuning.sparse);
  const auto blocks = static_cast<unsigned>(warps / (kThreads / kWarpSize));
  fetch_kernel<<<blocks, kThreads, 0, stream>>>(p);
  SPARSE_KVCM_CUDA_CHECK(cudaGetLastError());
}

}  // namespace sparse_kvcm
