#include "cuda/virtual_memory.hpp"

#include <cuda_runtime_api.h>
#include <unistd.h>

#include <memory>
#include <new>
#include <stdexcept>
#include <utility>

#include "core/check.hpp"
#include "cuda/cuda_backend.hpp"
#include "cuda/error.hpp"
#include "cuda/handles.hpp"
#include "cuda/host_registration.hpp"

namespace sparse_kvcm {
namespace {

constexpr const char* kFunction = "Storage";
constexpr const char* kReservation = "the reservation of a pool's addresses";
constexpr unsigned kDriverVersion = 12000;  // whose signatures cudaTypedefs.h gives the names above

template <class Function>
void load(const char* name, Function& function) {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion(name, &address, kDriverVersion, cudaEnableDefault, &result);
  if (status != cudaSuccess || result != cudaDriverEntryPointSuccess || address == nullptr) {
    static_cast<void>(cudaGetLastError());
    throw NotAvailable(message("cuda", "the driver has no ", name, ", which pools need"));
  }
  function = reinterpret_cast<Function>(address);
}

VirtualMemoryApi load_api() {
  VirtualMemoryApi api;
  load("cuMemAddressReserve", api.address_reserve);
  load("cuMemAddressFree", api.address_free);
  load("cuMemCreate", api.create);
  load("cuMemRelease", api.release);
  load("cuMemMap", api.map);
  load("cuMemUnmap", api.unmap);
  load("cuMemSetAccess", api.set_access);
  load("cuMemGetAllocationGranularity", api.get_granularity);
  return api;
}

void check_driver(CUresult status, const char* call) {
  if (status == CUDA_SUCCESS) return;
  if (status == CUDA_ERROR_OUT_OF_MEMORY) throw std::bad_alloc();
  throw std::runtime_error(
      message("cuda", call, " failed: CUresult ", static_cast<std::int32_t>(status)));
}

// Of what was asked for, not a lack of it.
bool is_refusal(CUresult status) {
  return status == CUDA_ERROR_INVALID_VALUE || status == CUDA_ERROR_NOT_SUPPORTED;
}

CUdeviceptr number(const std::byte* address) { return reinterpret_cast<CUdeviceptr>(address); }

void synchronize_device(std::int32_t index) {
  const DeviceGuard guard(index);
  SPARSE_KVCM_CUDA_CHECK(cudaDeviceSynchronize());
}

// The driver's calls need the context that this makes.
VirtualMemoryApi api_with_context(std::int32_t index) {
  const VirtualMemoryApi api = load_api();
  const DeviceGuard guard(index);
  SPARSE_KVCM_CUDA_CHECK(cudaFree(nullptr));
  return api;
}

}  // namespace

VirtualMemory::VirtualMemory(const VirtualMemoryApi& api, std::int32_t index, Warn warn)
    : api_(api), index_(index), warn_(std::move(warn)) {
  const CUresult status = with_properties([&](const CUmemAllocationProp& wanted) {
    return api_.get_granularity(&granularity_, &wanted, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
  });
  check_driver(status, "cuMemGetAllocationGranularity");
}

// Some drivers refuse the property where the machine cannot let network cards in: the memory then
// is ordinary memory.
template <class Call>
CUresult VirtualMemory::with_properties(Call call) {
  CUmemAllocationProp wanted{};
  wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  wanted.location = {CU_MEM_LOCATION_TYPE_DEVICE, {index_}};
  wanted.allocFlags.gpuDirectRDMACapable = rdma_ ? 1 : 0;
  const CUresult status = call(wanted);
  if (!is_refusal(status) || wanted.allocFlags.gpuDirectRDMACapable == 0) return status;
  wanted.allocFlags.gpuDirectRDMACapable = 0;
  const CUresult without = call(wanted);
  if (without != CUDA_SUCCESS || !rdma_.exchange(false) || !warn_) return without;
  warn_(message(kFunction, "the driver gives no memory on cuda:", index_,
                " that network cards reach (gpuDirectRDMACapable); transfers from there go through "
                "the host"));
  return without;
}

std::byte* VirtualMemory::reserve(std::size_t bytes, std::size_t alignment) const {
  CUdeviceptr address = 0;
  CUresult status = api_.address_reserve(&address, bytes, alignment, 0, 0);
  if (is_refusal(status)) status = api_.address_reserve(&address, bytes, 0, 0, 0);
  if (status == CUDA_ERROR_OUT_OF_MEMORY) fail_device_bytes(kFunction, kReservation, bytes);
  check_driver(status, "cuMemAddressReserve");
  return reinterpret_cast<std::byte*>(address);  // NOLINT(performance-no-int-to-ptr)
}

void VirtualMemory::release(std::byte* address, std::size_t bytes) const noexcept {
  api_.address_free(number(address), bytes);
}

// The mapping keeps the memory alive, so its handle can go at once.
void VirtualMemory::map_granule(std::byte* address, std::size_t bytes) {
  CUmemGenericAllocationHandle memory = 0;
  const CUresult made = with_properties(
      [&](const CUmemAllocationProp& wanted) { return api_.create(&memory, bytes, &wanted, 0); });
  check_driver(made, "cuMemCreate");
  const CUresult mapped = api_.map(number(address), bytes, 0, memory, 0);
  api_.release(memory);
  check_driver(mapped, "cuMemMap");
}

// Memory of its own for each granule, since what one cuMemCreate gave can only go as a whole;
// access for all of them at once.
void VirtualMemory::map(std::byte* address, std::size_t bytes, std::size_t granule) {
  CUmemAccessDesc access{};
  access.location = {CU_MEM_LOCATION_TYPE_DEVICE, {index_}};
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  std::size_t mapped = 0;
  try {
    for (; mapped < bytes; mapped += granule) map_granule(address + mapped, granule);
    check_driver(api_.set_access(number(address), bytes, &access, 1), "cuMemSetAccess");
  } catch (const std::bad_alloc&) {
    if (mapped > 0) unmap(address, mapped, granule);
    fail_device_bytes(kFunction, "the part that a pool grows by", bytes);  // all is free again
  } catch (...) {
    if (mapped > 0) unmap(address, mapped, granule);
    throw;
  }
}

// One mapping at a time, as the driver's manual has it; compute-sanitizer loses track of memory
// that goes in one call with its neighbours.
void VirtualMemory::unmap(std::byte* address, std::size_t bytes,
                          std::size_t granule) const noexcept {
  for (std::size_t done = 0; done < bytes; done += granule) {
    api_.unmap(number(address + done), granule);
  }
}

CudaDeviceMemory::CudaDeviceMemory(std::int32_t index, const Warn& warn)
    : index_(index), memory_(api_with_context(index), index, warn) {}

std::byte* CudaDeviceMemory::reserve(std::size_t bytes, std::size_t alignment) {
  const DeviceGuard guard(index_);
  return memory_.reserve(bytes, alignment);
}

void CudaDeviceMemory::release(std::byte* address, std::size_t bytes) noexcept {
  memory_.release(address, bytes);
}

void CudaDeviceMemory::map(std::byte* address, std::size_t bytes, std::size_t granule) {
  const DeviceGuard guard(index_);
  memory_.map(address, bytes, granule);
}

void CudaDeviceMemory::unmap(std::byte* address, std::size_t bytes, std::size_t granule) noexcept {
  memory_.unmap(address, bytes, granule);
}

void CudaDeviceMemory::synchronize() { synchronize_device(index_); }

CudaPinnedMemory::CudaPinnedMemory(std::int32_t index, int numa_node, const Warn& warn)
    : FilledHostMemory(warn, numa_node), index_(index), owner_(getpid()) {}

std::size_t CudaPinnedMemory::most_opened() const { return most_registered(); }

void CudaPinnedMemory::open(std::byte* address, std::size_t bytes) {
  keep_from_children(address, bytes);
  const DeviceGuard guard(index_);
  const RelaxedCapture relaxed;
  // Kernels take one base address for the whole range.
  if (register_host_memory(kFunction, address, bytes, registered_ + bytes) == address) {
    registered_ += bytes;
    return;
  }
  unregister_host_memory(index_, address);
  throw std::runtime_error(message(kFunction,
                                   "the device maps host memory to other addresses than the "
                                   "host's, which pools that grow need to be the same"));
}

void CudaPinnedMemory::close(std::byte* address, std::size_t bytes) noexcept {
  if (owner_ != getpid()) return;
  registered_ -= bytes;
  const RelaxedCapture relaxed;
  unregister_host_memory(index_, address);
}

void CudaPinnedMemory::unmap(std::byte* address, std::size_t bytes, std::size_t granule) noexcept {
  if (owner_ == getpid()) FilledHostMemory::unmap(address, bytes, granule);
}

void CudaPinnedMemory::release(std::byte* address, std::size_t bytes) noexcept {
  if (owner_ == getpid()) FilledHostMemory::release(address, bytes);
}

void CudaPinnedMemory::synchronize() {
  if (owner_ == getpid()) synchronize_device(index_);
}

std::shared_ptr<MemoryDriver> CudaBackend::memory_driver(MemoryKind kind, const Warn& warn) {
  if (kind == MemoryKind::kDevice) return std::make_shared<CudaDeviceMemory>(index_, warn);
  return std::make_shared<CudaPinnedMemory>(index_, numa_node_, warn);
}

}  // namespace sparse_kvcm
