// What the machine has. The runtime is linked statically and finds the driver by itself, so without
// one these calls return an error and nothing fails to load.
#include <memory>
#include <string>

#include "core/check.hpp"
#include "cuda/cuda_backend.hpp"
#include "cuda/error.hpp"
#include "cuda/kernels.hpp"
#include "sparse_kvcm/device.hpp"

namespace sparse_kvcm {
namespace {

struct Devices {
  cudaError_t status = cudaSuccess;
  int count = 0;
};

Devices count_devices() noexcept {
  Devices devices;
  devices.status = cudaGetDeviceCount(&devices.count);
  if (devices.status != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    devices.count = 0;
  }
  return devices;
}

}  // namespace

bool cuda_is_available() noexcept { return count_devices().count > 0; }

std::string cuda_unavailable_reason() {
  const Devices devices = count_devices();
  if (devices.status != cudaSuccess) {
    return std::string("the CUDA runtime finds no GPU: ") + cudaGetErrorString(devices.status);
  }
  return devices.count > 0 ? "" : "the CUDA driver reports no GPU";
}

std::shared_ptr<Backend> make_cuda_backend(std::int32_t index) {
  const Devices devices = count_devices();
  if (index >= devices.count) {
    throw NotAvailable(message("backend_for", "there is no device \"cuda:", index, "\": ",
                               devices.count > 0
                                   ? "the number of GPUs is " + std::to_string(devices.count)
                                   : cuda_unavailable_reason()));
  }
  const DeviceGuard guard(index);
  const cudaError_t image = probe_kernel_image();
  if (image == cudaErrorNoKernelImageForDevice || image == cudaErrorInvalidDeviceFunction) {
    static_cast<void>(cudaGetLastError());
    throw NotAvailable(message("backend_for", "this build has no code for \"cuda:", index,
                               "\": build it with its architecture in CMAKE_CUDA_ARCHITECTURES"));
  }
  check_cuda(image, "cudaFuncGetAttributes");
  return std::make_shared<CudaBackend>(index);
}

}  // namespace sparse_kvcm
