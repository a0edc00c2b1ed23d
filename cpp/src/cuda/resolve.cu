// One block per row, 256 or 512 threads. Shared memory holds the selection's index; how long a
// history its bitmap covers is a choice of the launch (resolve_plan.hpp), and rows beyond it take
// the sorted list, with the same result.
#include "core/row_state.hpp"
#include "cuda/device/resolve_row.cuh"
#include "cuda/error.hpp"
#include "cuda/kernels.hpp"
#include "cuda/resolve_plan.hpp"

namespace sparse_kvcm {
namespace {

using device::BitmapIndex;
using device::RowMemory;
using device::SortedIndex;

// What a row without units gives: padding, nobody seated, a fault.
__device__ void write_nothing(const ops::ResolveParams& p, std::int64_t i, std::uint32_t error) {
  for (int j = threadIdx.x; j < p.k; j += blockDim.x) p.slots[i * p.k + j] = kNoSlot;
  for (int j = threadIdx.x; j < p.max_new_units; j += blockDim.x) {
    p.write_slots[i * p.max_new_units + j] = p.no_write_slot;
  }
  if (threadIdx.x != 0) return;
  p.miss_counts[i] = 0;
  p.hit_counts[i] = 0;
  p.errors.errors[i] = error;
  if (p.errors.row_errors != nullptr && error != 0) {
    device::raise(p.errors.row_errors + p.launch.rows[i], error);
  }
}

// What a row needs beside its index.
template <int kThreads>
struct RowLaunch {
  const ops::ResolveParams& params;
  std::int64_t i;
  const RowState& state;
  StepState step;
  std::uint32_t last;
  const RowMemory& memory;
  const device::SelectionPart<kThreads>& selected;
};

template <int kThreads, bool kOneTile, class Index>
__device__ void resolve_row(const RowLaunch<kThreads>& row, const Index& index) {
  device::RowResolver<kThreads, Index, kOneTile> resolver(row.params, row.state, row.i, row.memory,
                                                          index, row.selected);
  __syncthreads();  // shared memory is clear
  resolver.index_selection();
  if (row.step.open == 0 || row.last == row.step.clock) {
    write_nothing(row.params, row.i, kErrorStale);
  } else {
    resolver.run(row.last, row.step.clock);
  }
}

// A block of 256 threads leaves room for five on a multiprocessor, one of 512 for two.
template <int kThreads>
__global__ void __launch_bounds__(kThreads, kThreads == 256 ? 5 : 2)
    resolve_kernel(const __grid_constant__ ops::ResolveParams p, std::int32_t bitmap_units) {
  extern __shared__ __align__(16) std::byte shared[];
  const std::int64_t i = blockIdx.x;
  const device::SelectionPart<kThreads> selected(p.selection + i * p.selection_stride, p.k);
  const std::int32_t row =
      device::find_seat(p.launch.rows[i], p.launch.row_states, p.launch.num_rows);
  const StepState step = *p.step;
  const RowMemory memory(shared, p.k);
  memory.clear<kThreads>(p.k);
  BitmapIndex<kThreads>::clear(memory.index, bitmap_units);
  if (threadIdx.x == 0) p.errors.errors[i] = 0;
  if (row < 0) {
    if (row == device::kNoSeat && threadIdx.x == 0) {
      device::raise(p.errors.batch_error, kBatchErrorRow);
    }
    write_nothing(p, i, 0);
    return;
  }
  const RowState state = p.launch.row_states[row];
  if (!row_is_consistent(state, p)) {
    write_nothing(p, i, kErrorLease);
    return;
  }
  const RowLaunch<kThreads> launch{p, i, state, step, p.last[state.lease_id], memory, selected};
  const std::int32_t cached_end = min(state.watermark, state.window_begin);
  const BitmapIndex<kThreads> bitmap(memory.index, bitmap_units, cached_end);
  if (cached_end > bitmap_units) {
    resolve_row<kThreads, false>(launch, SortedIndex<kThreads>(memory.index, p.k, cached_end));
  } else if (state.cached_slots > kThreads * device::kTile) {
    resolve_row<kThreads, false>(launch, bitmap);
  } else {
    resolve_row<kThreads, true>(launch, bitmap);
  }
}

template <int kThreads>
void launch(const ops::ResolveParams& params, const ResolvePlan& plan, cudaStream_t stream) {
  resolve_kernel<kThreads>
      <<<static_cast<unsigned>(params.launch.b), kThreads,
         static_cast<std::size_t>(plan.shared_bytes), stream>>>(params, plan.bitmap_units);
  SPARSE_KVCM_CUDA_CHECK(cudaGetLastError());
}

}  // namespace

const void* resolve_kernel_of(std::int32_t threads) {
  return threads == 256 ? reinterpret_cast<const void*>(resolve_kernel<256>)
                        : reinterpret_cast<const void*>(resolve_kernel<512>);
}

std::int64_t resolve_shared_bytes(std::int32_t k, std::int32_t bitmap_units) {
  const std::int64_t bitmap = BitmapIndex<256>::bytes(bitmap_units);
  const std::int64_t sorted = SortedIndex<256>::bytes(k);
  return RowMemory::bytes(k) + (bitmap > sorted ? bitmap : sorted);
}

void launch_resolve(const ops::ResolveParams& params, const ResolvePlan& plan,
                    cudaStream_t stream) {
  plan.threads == 256 ? launch<256>(params, plan, stream) : launch<512>(params, plan, stream);
}

}  // namespace sparse_kvcm
