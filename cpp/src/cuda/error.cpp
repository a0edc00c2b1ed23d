#include "cuda/error.hpp"

#include <new>
#include <stdexcept>

#include "core/check.hpp"

namespace sparse_kvcm {

void check_cuda(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());
  if (status == cudaErrorMemoryAllocation) throw std::bad_alloc();
  throw std::runtime_error(message("cuda", call, " failed: ", cudaGetErrorName(status), ", ",
                                   cudaGetErrorString(status)));
}

}  // namespace sparse_kvcm
