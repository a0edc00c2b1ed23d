// Virtual memory on an NVIDIA GPU, and pinned host memory that grows in place.
//
// Device memory goes through the driver's cuMem calls, whose entry points come from the driver at
// run time: nothing links against libcuda. Host memory is mmap plus cudaHostRegister by chunks:
// kernels may cross from one chunk to the next, a cudaMemcpy may not.
#pragma once

#include <cudaTypedefs.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "backend/host_memory.hpp"

namespace sparse_kvcm {

// The driver's calls for virtual memory.
struct VirtualMemoryApi {
  PFN_cuMemAddressReserve_v10020 address_reserve = nullptr;
  PFN_cuMemAddressFree_v10020 address_free = nullptr;
  PFN_cuMemCreate_v10020 create = nullptr;
  PFN_cuMemRelease_v10020 release = nullptr;
  PFN_cuMemMap_v10020 map = nullptr;
  PFN_cuMemUnmap_v10020 unmap = nullptr;
  PFN_cuMemSetAccess_v10020 set_access = nullptr;
  PFN_cuMemGetAllocationGranularity_v10020 get_granularity = nullptr;
};

// Those calls, as a MemoryDriver needs them; on the current device, which is `index`. What a driver
// refuses though it has memory is done without: memory that network cards reach, which is not asked
// for again once the driver has given other memory instead, and `warn` hears of it; addresses at a
// multiple of the granule, which are asked for each time.
// Thread-safe.
class VirtualMemory {
 public:
  // Throws std::runtime_error, as all below.
  VirtualMemory(const VirtualMemoryApi& api, std::int32_t index, Warn warn = {});

  [[nodiscard]] std::size_t granularity() const { return granularity_; }
  // Throws DeviceMemoryError too, as map does.
  [[nodiscard]] std::byte* reserve(std::size_t bytes, std::size_t alignment) const;
  void release(std::byte* address, std::size_t bytes) const noexcept;
  void map(std::byte* address, std::size_t bytes, std::size_t granule);
  void unmap(std::byte* address, std::size_t bytes, std::size_t granule) const noexcept;

 private:
  template <class Call>
  CUresult with_properties(Call call);
  void map_granule(std::byte* address, std::size_t bytes);

  VirtualMemoryApi api_;
  std::int32_t index_;
  Warn warn_;
  std::atomic<bool> rdma_ = true;
  std::size_t granularity_ = 0;
};

class CudaDeviceMemory final : public MemoryDriver {
 public:
  // Throws NotAvailable if the driver lacks virtual memory.
  CudaDeviceMemory(std::int32_t index, const Warn& warn);

  [[nodiscard]] std::size_t granularity() const override { return memory_.granularity(); }
  [[nodiscard]] bool is_host_memory() const override { return false; }
  [[nodiscard]] bool needs_fill() const override { return false; }
  [[nodiscard]] std::byte* reserve(std::size_t bytes, std::size_t alignment) override;
  void release(std::byte* address, std::size_t bytes) noexcept override;
  void map(std::byte* address, std::size_t bytes, std::size_t granule) override;
  void unmap(std::byte* address, std::size_t bytes, std::size_t granule) noexcept override;
  void synchronize() override;

 private:
  std::int32_t index_;
  VirtualMemory memory_;
};

// Touched host memory, registered with the driver. Children of a fork get nothing of it, and leave
// it alone.
class CudaPinnedMemory final : public FilledHostMemory {
 public:
  CudaPinnedMemory(std::int32_t index, int numa_node, const Warn& warn);

  void open(std::byte* address, std::size_t bytes) override;
  void close(std::byte* address, std::size_t bytes) noexcept override;
  void unmap(std::byte* address, std::size_t bytes, std::size_t granule) noexcept override;
  void release(std::byte* address, std::size_t bytes) noexcept override;
  [[nodiscard]] std::size_t most_opened() const override;
  void synchronize() override;

 private:
  std::int32_t index_;
  int owner_;                                // the process that has it
  std::atomic<std::size_t> registered_ = 0;  // bytes
};

}  // namespace sparse_kvcm
