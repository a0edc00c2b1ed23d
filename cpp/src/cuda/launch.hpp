// Launches a kernel so that its blocks may be placed, and its shared memory prepared, while the
// kernel before it in the stream ends. Where the kernel's code has no wait for that (compiled for
// less than Hopper, whatever the device), it is a plain launch.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/rounding.hpp"
#include "cuda/error.hpp"

namespace sparse_kvcm {

// Blocks for `items` of which a block takes `per_block` at a time, and then others: no more than
// keep an H200 busy, four per processor. REQUIRES: items >= 1.
[[nodiscard]] inline unsigned num_blocks(std::int64_t items, std::int64_t per_block = 1) {
  constexpr std::int64_t kMost = 528;
  return static_cast<unsigned>(std::min(ceil_div(items, per_block), kMost));
}

struct LaunchShape {
  unsigned blocks = 1;
  unsigned threads = 1;
  std::size_t shared_bytes = 0;  // dynamic
};

// Whether the code of `kernel` that runs on the current device can wait. Asks the driver once for
// each. Thread-safe.
[[nodiscard]] bool can_overlap(const void* kernel);

// On the current device. REQUIRES: the kernel keeps what device/overlap.cuh asks.
template <class... Params, class... Args>
void launch_to_overlap(void (*kernel)(Params...), const LaunchShape& shape, cudaStream_t stream,
                       const Args&... args) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(shape.blocks);
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = can_overlap(reinterpret_cast<const void*>(kernel)) ? 1 : 0;
  SPARSE_KVCM_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, args...));
}

}  // namespace sparse_kvcm
