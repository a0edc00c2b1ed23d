// Launchers of the kernels: each enqueues on `stream` of the current device and checks the launch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backend/backend.hpp"
#include "sparse_kvcm/ops.hpp"

namespace sparse_kvcm {

struct ResolvePlan;

void launch_resolve(const ops::ResolveParams& params, const ResolvePlan& plan, cudaStream_t stream);
// `in_flight` host rows are read at a time (tuning.hpp).
void launch_fetch(const ops::FetchParams& params, std::int32_t in_flight, cudaStream_t stream);
void launch_move_units(const ops::MoveParams& params, cudaStream_t stream);
void launch_reset_leases(const ops::ResetParams& params, cudaStream_t stream);
void launch_convert(const ops::ConvertParams& params, cudaStream_t stream);
// `runs` and `words` are memory that the device can read, until the kernel has run.
void launch_patch(std::int32_t* destination, const PatchRun* runs, std::int64_t num_runs,
                  const std::int32_t* words, cudaStream_t stream);
void launch_copy_pages(const PageCopy& copy, cudaStream_t stream);

// cudaSuccess if this build has code for the current device.
[[nodiscard]] cudaError_t probe_kernel_image();

}  // namespace sparse_kvcm
