#include "cuda/pinned_buffer.hpp"

#include <cuda_runtime_api.h>
#include <sys/utsname.h>

#include <algorithm>
#include <array>
#include <stdexcept>

#include "core/check.hpp"
#include "core/host_limits.hpp"
#include "cuda/error.hpp"

namespace sparse_kvcm {
namespace {

std::size_t chunk_bytes(const PinnedOptions& options) {
  static const std::size_t kernel_limit = [] {
    utsname name{};
    return registration_limit(uname(&name) == 0 ? name.release : "");
  }();
  const std::size_t limit = options.chunk_bytes == 0 ? kernel_limit : options.chunk_bytes;
  const std::size_t whole = std::max(limit / kHugePage, std::size_t{1}) * kHugePage;
  return chunk_size(whole, std::max(options.page_bytes, std::size_t{1}));
}

// At the end of a process the driver may be gone, and its registrations with it: no failure counts.
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

PinnedBuffer::PinnedBuffer(std::size_t bytes, const PinnedOptions& options, int numa_node)
    : mapping_(bytes, numa_node),
      registration_(mapping_.data(), bytes, chunk_bytes(options),
                    {[this](std::byte* data, std::size_t size) { add(data, size); },
                     [this](std::byte* data) { remove(data); }}) {
  SPARSE_KVCM_CUDA_CHECK(cudaGetDevice(&device_));
  // One after the other: side by side they wait for the same lock of the address space, and both
  // together take twice as long. Each is half of the progress.
  const auto report = [&](std::int64_t touched, std::int64_t registered) {
    if (options.progress) {
      options.progress((touched + registered) / 2, static_cast<std::int64_t>(bytes));
    }
  };
  mapping_.fill([&](std::int64_t done, std::int64_t) { report(done, 0); });
  mapping_.keep_from_children();
  registration_.add_all([&](std::size_t registered) {
    report(static_cast<std::int64_t>(bytes), static_cast<std::int64_t>(registered));
  });
  if (!options.warn) return;
  for (const std::string& warning : mapping_.warnings()) options.warn(warning);
}

PinnedBuffer::~PinnedBuffer() {
  if (bytes() > 0) on_device(device_, cudaDeviceSynchronize);
}

void PinnedBuffer::add(std::byte* data, std::size_t bytes) {
  constexpr unsigned kFlags = cudaHostRegisterPortable | cudaHostRegisterMapped;
  const cudaError_t status = cudaHostRegister(data, bytes, kFlags);
  if (status != cudaSuccess) {
    const HostLimits limits = read_host_limits();
    const bool memlock =
        limits.memlock && mapping_.bytes() > static_cast<std::size_t>(*limits.memlock);
    if (status != cudaErrorMemoryAllocation && !memlock) check_cuda(status, "cudaHostRegister");
    static_cast<void>(cudaGetLastError());
    throw HostMemoryError(pin_failure("allocate_pinned", mapping_.bytes(),
                                      std::string("cudaHostRegister: ") + cudaGetErrorName(status),
                                      limits));
  }
  try {
    set_device_address(data);
  } catch (...) {
    remove(data);
    throw;
  }
}

// Kernels take one base address, so the chunks must lie side by side on the device as well. They do
// where the device uses the host's addresses.
void PinnedBuffer::set_device_address(std::byte* data) {
  void* address = nullptr;
  SPARSE_KVCM_CUDA_CHECK(cudaHostGetDevicePointer(&address, data, 0));
  const std::ptrdiff_t offset = data - mapping_.data();
  if (offset == 0) device_data_ = static_cast<std::byte*>(address);
  if (address == device_data_ + offset) return;
  throw std::runtime_error(message("allocate_pinned", "the device maps byte ", offset,
                                   " of host memory away from the bytes before it; a pool there "
                                   "can have ",
                                   offset, " B at most"));
}

void PinnedBuffer::remove(std::byte* data) const noexcept {
  on_device(device_, [&] { return cudaHostUnregister(data); });
}

int gpu_numa_node(std::int32_t index) {
  std::array<char, 32> bus_id{};
  SPARSE_KVCM_CUDA_CHECK(cudaDeviceGetPCIBusId(bus_id.data(), bus_id.size(), index));
  return numa_node_of(bus_id.data());
}

}  // namespace sparse_kvcm
