// One block per row, 256 or 512 threads. Shared memory holds the selection's index; how long a
// history each form of it covers is a choice of the launch (resolve_plan.hpp). The result is the
// same.
#include <algorithm>

#include "cuda/device/overlap.cuh"
#include "cuda/device/resolve_row.cuh"
#include "cuda/kernels.hpp"
#include "cuda/launch.hpp"
#include "cuda/resolve_plan.hpp"

namespace sparse_kvcm {
namespace {

using device::BitmapIndex;
using device::DirectIndex;
using device::MissSet;
using device::RowMemory;
using device::SortedIndex;

// What a row needs beside its index.
template <int kThreads>
struct RowLaunch {
  const ops::ResolveParams& params;
  std::int64_t i;
  const RowMemory& memory;
  const device::SelectionPart<kThreads>& selected;
};

// `index_bytes` is what the index takes, `keys` the most that it gives.
template <int kThreads, bool kOneTile, class Index>
__device__ void resolve_row(const RowLaunch<kThreads>& row, const Index& index,
                            std::uint32_t index_bytes, std::int32_t keys) {
  const MissSet<kThreads> misses(row.memory.index + index_bytes, keys);
  device::RowResolver<kThreads, Index, kOneTile>(row.params, row.i, row.memory, index, misses,
                                                 row.selected)
      .run();
}

// Takes the first form that covers the row.
template <int kThreads, bool kOneTile>
__device__ void choose_index(const RowLaunch<kThreads>& row, const ResolvePlan& plan) {
  std::byte* memory = row.memory.index;
  const std::int32_t k = row.params.k;
  const std::int32_t cached_end = row.memory.head->cached_end;
  if (cached_end <= plan.direct_units &&
      row.memory.head->cached_slots <= DirectIndex<kThreads>::kMaxSlots) {
    resolve_row<kThreads, kOneTile>(row, DirectIndex<kThreads>(memory, cached_end),
                                    DirectIndex<kThreads>::bytes(plan.direct_units),
                                    plan.direct_units);
  } else if (cached_end <= plan.bitmap_units) {
    resolve_row<kThreads, kOneTile>(row,
                                    BitmapIndex<kThreads>(memory, plan.bitmap_units, cached_end),
                                    BitmapIndex<kThreads>::bytes(plan.bitmap_units, k), k);
  } else {
    resolve_row<kThreads, false>(row, SortedIndex<kThreads>(memory, k, cached_end),
                                 SortedIndex<kThreads>::bytes(k), k);
  }
}

// A block of 256 threads leaves room for six on a multiprocessor, one of 512 for two.
template <int kThreads>
__global__ void __launch_bounds__(kThreads, kThreads == 256 ? 6 : 2)
    resolve_kernel(const __grid_constant__ ops::ResolveParams p,
                   const __grid_constant__ ResolvePlan plan) {
  extern __shared__ __align__(16) std::byte shared[];
  const std::int64_t i = blockIdx.x;
  const RowMemory memory(shared, p.k);
  device::let_later_work_begin();
  if (threadIdx.x >= device::kWarpSize) memory.clear<kThreads>(plan.shared_bytes);
  device::wait_for_earlier_work();
  const device::SelectionPart<kThreads> selected(p.selection + i * p.selection_stride, p.k);
  if (threadIdx.x == 0) {
    *memory.head = device::read_head(p, i);
    p.errors.errors[i] = 0;
  }
  __syncthreads();
  const std::uint32_t refusal = memory.head->refusal;
  if (refusal != 0) {
    device::write_nothing(p, i, refusal & ~device::kNothing);
    return;
  }
  const RowLaunch<kThreads> launch{p, i, memory, selected};
  if (memory.head->cached_slots > kThreads * device::kTile) {
    choose_index<kThreads, false>(launch, plan);
  } else {
    choose_index<kThreads, true>(launch, plan);
  }
}

template <int kThreads>
std::uint32_t shared_bytes(std::int32_t k, std::int32_t direct_units, std::int32_t bitmap_units) {
  const std::uint32_t direct =
      DirectIndex<kThreads>::bytes(direct_units) + MissSet<kThreads>::bytes(direct_units);
  const std::uint32_t ranks = MissSet<kThreads>::bytes(k);
  const std::uint32_t bitmap = BitmapIndex<kThreads>::bytes(bitmap_units, k) + ranks;
  const std::uint32_t sorted = SortedIndex<kThreads>::bytes(k) + ranks;
  return RowMemory::bytes(k) + std::max({direct, bitmap, sorted});
}

template <int kThreads>
void launch(const ops::ResolveParams& params, const ResolvePlan& plan, cudaStream_t stream) {
  launch_to_overlap(resolve_kernel<kThreads>,
                    {static_cast<unsigned>(params.launch.b), kThreads, plan.shared_bytes}, stream,
                    params, plan);
}

}  // namespace

const void* resolve_kernel_of(std::int32_t threads) {
  return threads == 256 ? reinterpret_cast<const void*>(resolve_kernel<256>)
                        : reinterpret_cast<const void*>(resolve_kernel<512>);
}

std::uint32_t resolve_shared_bytes(std::int32_t threads, std::int32_t k, std::int32_t direct_units,
                                   std::int32_t bitmap_units) {
  return threads == 256 ? shared_bytes<256>(k, direct_units, bitmap_units)
                        : shared_bytes<512>(k, direct_units, bitmap_units);
}

void launch_resolve(const ops::ResolveParams& params, const ResolvePlan& plan,
                    cudaStream_t stream) {
  plan.threads == 256 ? launch<256>(params, plan, stream) : launch<512>(params, plan, stream);
}

}  // namespace sparse_kvcm
