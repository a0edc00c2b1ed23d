#include "cuda/error.hpp"

#include <stdexcept>

#include "core/check.hpp"
#include "core/device_memory.hpp"

namespace sparse_kvcm {

void check_cuda(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());
  if (status == cudaErrorMemoryAllocation) fail_device_bytes("cuda", call, 0);
  throw std::runtime_error(message("cuda", call, " failed: ", cudaGetErrorName(status), ", ",
                                   cudaGetErrorString(status)));
}

void fail_device_bytes(const char* function, std::string_view part, std::size_t bytes) {
  std::size_t free = 0;
  std::size_t total = 0;
  if (cudaMemGetInfo(&free, &total) != cudaSuccess) static_cast<void>(cudaGetLastError());
  fail_device_memory(function, part, {bytes, free, total});
}

}  // namespace sparse_kvcm
