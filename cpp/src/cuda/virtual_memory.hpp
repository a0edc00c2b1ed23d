// Virtual memory on an NVIDIA GPU, and pinned host memory that grows in place.
//
// Device memory goes through the driver's cuMem calls, whose entry points come from the driver at
// run time: nothing links against libcuda. Host memory is mmap plus cudaHostRegister by granule:
// kernels may cross from one granule to the next, a cudaMemcpy may not.
#pragma once

#include <cudaTypedefs.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "backend/memory_driver.hpp"

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

class CudaDeviceMemory final : public MemoryDriver {
 public:
  // Throws NotAvailable if the driver lacks virtual memory.
  explicit CudaDeviceMemory(std::int32_t index);

  [[nodiscard]] std::size_t granularity() const override { return granularity_; }
  [[nodiscard]] bool is_host_memory() const override { return false; }
  [[nodiscard]] bool needs_fill() const override { return false; }
  [[nodiscard]] std::byte* reserve(std::size_t bytes, std::size_t alignment) override;
  void release(std::byte* address, std::size_t bytes) noexcept override;
  void map(std::byte* address, std::size_t bytes) override;
  void unmap(std::byte* address, std::size_t bytes) noexcept override;
  void fill(std::byte*, std::size_t) override {}
  void synchronize() override;

 private:
  [[nodiscard]] CUmemAllocationProp properties() const;
  [[nodiscard]] CUmemGenericAllocationHandle create(std::size_t bytes);

  std::int32_t index_;
  VirtualMemoryApi api_;
  std::size_t granularity_ = 0;
  // Memory that network cards reach, until the driver says that it has none.
  std::atomic<bool> rdma_ = true;
};

class CudaPinnedMemory final : public MemoryDriver {
 public:
  explicit CudaPinnedMemory(std::int32_t index) : index_(index) {}

  [[nodiscard]] std::size_t granularity() const override;
  [[nodiscard]] bool is_host_memory() const override { return true; }
  [[nodiscard]] bool needs_fill() const override { return true; }
  [[nodiscard]] std::byte* reserve(std::size_t bytes, std::size_t alignment) override;
  void release(std::byte* address, std::size_t bytes) noexcept override;
  void map(std::byte* address, std::size_t bytes) override;
  void unmap(std::byte* address, std::size_t bytes) noexcept override;
  void fill(std::byte* address, std::size_t bytes) override;
  void synchronize() override;

 private:
  std::int32_t index_;
};

}  // namespace sparse_kvcm
