// Turns CUDA's error codes into exceptions.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <string_view>

namespace sparse_kvcm {

// Throws DeviceMemoryError for cudaErrorMemoryAllocation, else std::runtime_error that names
// `call`.
// Forgets the error in CUDA's own memory of it, so that the next call does not report it again.
void check_cuda(cudaError_t status, const char* call);

// Throws DeviceMemoryError: `part` of what `function` makes wanted `bytes` of the current device.
[[noreturn]] void fail_device_bytes(const char* function, std::string_view part, std::size_t bytes);

}  // namespace sparse_kvcm

#define SPARSE_KVCM_CUDA_CHECK(call) ::sparse_kvcm::check_cuda((call), #call)
