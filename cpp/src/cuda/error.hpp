// Turns CUDA's error codes into exceptions.
#pragma once

#include <cuda_runtime_api.h>

namespace sparse_kvcm {

// Throws std::bad_alloc for cudaErrorMemoryAllocation, else std::runtime_error that names `call`.
// Forgets the error in CUDA's own memory of it, so that the next call does not report it again.
void check_cuda(cudaError_t status, const char* call);

}  // namespace sparse_kvcm

#define SPARSE_KVCM_CUDA_CHECK(call) ::sparse_kvcm::check_cuda((call), #call)
