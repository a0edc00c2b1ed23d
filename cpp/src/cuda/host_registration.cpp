#include "cuda/host_registration.hpp"

#include <cuda_runtime_api.h>
#include <sys/utsname.h>

#include <string>

#include "core/check.hpp"
#include "core/chunked_registration.hpp"
#include "core/host_limits.hpp"
#include "cuda/error.hpp"

namespace sparse_kvcm {
namespace {

template <class Call>
void on_device(int device, Call call) noexcept {
  int previous = 0;
  cudaError_t status = cudaGetDevice(&previous);
  if (status == cudaSuccess) status = cudaSetDevice(device);
  if (status == cudaSuccess) {
    status = call();
    static_cast<void>(cudaSetDevice(previous));
  }
  if (status != cudaSuccess) static_cast<void>(cudaGetLastError());
}

}  // namespace

std::size_t most_registered() {
  static const std::size_t limit = [] {
    utsname name{};
    return registration_limit(uname(&name) == 0 ? name.release : "");
  }();
  return limit;
}

std::byte* register_host_memory(const char* function, std::byte* data, std::size_t bytes,
                                std::size_t total_bytes) {
  constexpr unsigned kFlags = cudaHostRegisterPortable | cudaHostRegisterMapped;
  const cudaError_t status = cudaHostRegister(data, bytes, kFlags);
  if (status != cudaSuccess) {
    const HostLimits limits = read_host_limits();
    const bool memlock = limits.memlock && total_bytes > static_cast<std::size_t>(*limits.memlock);
    if (status != cudaErrorMemoryAllocation && !memlock) check_cuda(status, "cudaHostRegister");
    static_cast<void>(cudaGetLastError());
    throw HostMemoryError(pin_failure(function, total_bytes,
                                      std::string("cudaHostRegister: ") + cudaGetErrorName(status),
                                      limits));
  }
  void* address = nullptr;
  const cudaError_t found = cudaHostGetDevicePointer(&address, data, 0);
  if (found != cudaSuccess) static_cast<void>(cudaHostUnregister(data));
  check_cuda(found, "cudaHostGetDevicePointer");
  return static_cast<std::byte*>(address);
}

void unregister_host_memory(int device, std::byte* data) noexcept {
  on_device(device, [&] { return cudaHostUnregister(data); });
}

void await_device(int device) noexcept { on_device(device, cudaDeviceSynchronize); }

}  // namespace sparse_kvcm
