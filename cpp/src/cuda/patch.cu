// One warp per run. Runs and words are read where the host staged them: they are few, and a copy of
// its own would take longer to launch than they take over the link.
#include "cuda/device/block_scan.cuh"
#include "cuda/error.hpp"
#include "cuda/kernels.hpp"
#include "cuda/launch.hpp"

namespace sparse_kvcm {
namespace {

using device::kWarpSize;

constexpr int kThreads = 256;
constexpr std::int64_t kWarps = kThreads / kWarpSize;  // of a block

__global__ void __launch_bounds__(kThreads)
    patch_kernel(std::int32_t* destination, const PatchRun* runs, std::int64_t num_runs,
                 const std::int32_t* words) {
  const std::int64_t num_warps = std::int64_t{gridDim.x} * kWarps;
  std::int64_t i = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarpSize;
  for (; i < num_runs; i += num_warps) {
    const PatchRun run = runs[i];
    for (std::int32_t w = threadIdx.x % kWarpSize; w < run.count; w += kWarpSize) {
      destination[run.offset + w] =
          run.source == PatchRun::kMinusOne ? -1 : words[std::int64_t{run.source} + w];
    }
  }
}

}  // namespace

void launch_patch(std::int32_t* destination, const PatchRun* runs, std::int64_t num_runs,
                  const std::int32_t* words, cudaStream_t stream) {
  const unsigned blocks = num_blocks(num_runs, kWarps);
  patch_kernel<<<blocks, kThreads, 0, stream>>>(destination, runs, num_runs, words);
  SPARSE_KVCM_CUDA_CHECK(cudaGetLastError());
}

}  // namespace sparse_kvcm
