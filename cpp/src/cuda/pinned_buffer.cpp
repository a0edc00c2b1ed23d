#include "cuda/pinned_buffer.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <stdexcept>

#include "core/check.hpp"
#include "cuda/error.hpp"
#include "cuda/host_registration.hpp"

namespace sparse_kvcm {
namespace {

std::size_t chunk_bytes(const PinnedOptions& options) {
  const std::size_t limit = options.chunk_bytes == 0 ? most_registered() : options.chunk_bytes;
  return std::max(limit / kHugePage, std::size_t{1}) * kHugePage;
}

}  // namespace

PinnedBuffer::PinnedBuffer(std::size_t bytes, const PinnedOptions& options, int numa_node)
    : mapping_(bytes, numa_node),
      registration_(mapping_.data(), bytes, chunk_bytes(options),
                    {[this](std::byte* data, std::size_t size) { add(data, size); },
                     [this](std::byte* data) { unregister_host_memory(device_, data); }}) {
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
  if (bytes() > 0 && waits_) await_device(device_);
}

// Kernels take one base address, so the chunks must lie side by side on the device as well. They do
// where the device uses the host's addresses.
void PinnedBuffer::add(std::byte* data, std::size_t bytes) {
  std::byte* const address = register_host_memory("allocate_pinned", data, bytes, mapping_.bytes());
  const std::ptrdiff_t offset = data - mapping_.data();
  if (offset == 0) device_data_ = address;
  if (address == device_data_ + offset) return;
  unregister_host_memory(device_, data);
  throw std::runtime_error(message("allocate_pinned", "the device maps byte ", offset,
                                   " of host memory away from the bytes before it; a pool there "
                                   "can have ",
                                   offset, " B at most"));
}

int gpu_numa_node(std::int32_t index) {
  std::array<char, 32> bus_id{};
  SPARSE_KVCM_CUDA_CHECK(cudaDeviceGetPCIBusId(bus_id.data(), bus_id.size(), index));
  return numa_node_of(bus_id.data());
}

}  // namespace sparse_kvcm
