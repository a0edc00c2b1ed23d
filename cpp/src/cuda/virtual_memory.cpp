#include "cuda/virtual_memory.hpp"

#include <cuda_runtime_api.h>
#include <unistd.h>

#include <memory>
#include <new>
#include <stdexcept>

#include "core/check.hpp"
#include "cuda/cuda_backend.hpp"
#include "cuda/error.hpp"
#include "cuda/handles.hpp"
#include "cuda/host_registration.hpp"

namespace sparse_kvcm {
namespace {

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

CUdeviceptr number(const std::byte* address) { return reinterpret_cast<CUdeviceptr>(address); }

void synchronize_device(std::int32_t index) {
  const DeviceGuard guard(index);
  SPARSE_KVCM_CUDA_CHECK(cudaDeviceSynchronize());
}

// A thread of ours must not end a capture that another thread has begun.
class RelaxedCapture {
 public:
  RelaxedCapture() { exchange(); }
  ~RelaxedCapture() { exchange(); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  void exchange() { static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace

CUmemAllocationProp DeviceMemoryMaker::properties() const {
  CUmemAllocationProp wanted{};
  wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  wanted.location = {CU_MEM_LOCATION_TYPE_DEVICE, {index_}};
  wanted.allocFlags.gpuDirectRDMACapable = rdma_ ? 1 : 0;
  return wanted;
}

// Some drivers answer INVALID_VALUE where the machine cannot let network cards in: the memory then
// is ordinary memory.
CUmemGenericAllocationHandle DeviceMemoryMaker::make(std::size_t bytes) {
  CUmemGenericAllocationHandle memory = 0;
  CUmemAllocationProp wanted = properties();
  CUresult status = create_(&memory, bytes, &wanted, 0);
  const bool refused = status == CUDA_ERROR_INVALID_VALUE || status == CUDA_ERROR_NOT_SUPPORTED;
  if (refused && wanted.allocFlags.gpuDirectRDMACapable == 1) {
    rdma_ = false;
    wanted = properties();
    status = create_(&memory, bytes, &wanted, 0);
  }
  check_driver(status, "cuMemCreate");
  return memory;
}

CudaDeviceMemory::CudaDeviceMemory(std::int32_t index)
    : index_(index), api_(load_api()), maker_(api_.create, index) {
  const DeviceGuard guard(index_);
  SPARSE_KVCM_CUDA_CHECK(cudaFree(nullptr));  // makes the context that the driver's calls need
  const CUmemAllocationProp wanted = maker_.properties();
  check_driver(api_.get_granularity(&granularity_, &wanted, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
               "cuMemGetAllocationGranularity");
}

std::byte* CudaDeviceMemory::reserve(std::size_t bytes, std::size_t alignment) {
  const DeviceGuard guard(index_);
  CUdeviceptr address = 0;
  check_driver(api_.address_reserve(&address, bytes, alignment, 0, 0), "cuMemAddressReserve");
  return reinterpret_cast<std::byte*>(address);  // NOLINT(performance-no-int-to-ptr)
}

void CudaDeviceMemory::release(std::byte* address, std::size_t bytes) noexcept {
  api_.address_free(number(address), bytes);
}

// The mapping keeps the memory alive, so its handle can go at once.
void CudaDeviceMemory::map(std::byte* address, std::size_t bytes) {
  const DeviceGuard guard(index_);
  const CUmemGenericAllocationHandle memory = maker_.make(bytes);
  const CUresult mapped = api_.map(number(address), bytes, 0, memory, 0);
  api_.release(memory);
  check_driver(mapped, "cuMemMap");

  CUmemAccessDesc access{};
  access.location = {CU_MEM_LOCATION_TYPE_DEVICE, {index_}};
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  const CUresult opened = api_.set_access(number(address), bytes, &access, 1);
  if (opened != CUDA_SUCCESS) api_.unmap(number(address), bytes);
  check_driver(opened, "cuMemSetAccess");
}

void CudaDeviceMemory::unmap(std::byte* address, std::size_t bytes) noexcept {
  api_.unmap(number(address), bytes);
}

void CudaDeviceMemory::synchronize() { synchronize_device(index_); }

CudaPinnedMemory::CudaPinnedMemory(std::int32_t index, int numa_node, const Warn& warn)
    : FilledHostMemory(warn, numa_node), index_(index), owner_(getpid()) {}

std::size_t CudaPinnedMemory::most_opened() const { return most_registered(); }

void CudaPinnedMemory::open(std::byte* address, std::size_t bytes) {
  FilledHostMemory::open(address, bytes);
  keep_from_children(address, bytes);
  const DeviceGuard guard(index_);
  const RelaxedCapture relaxed;
  // Kernels take one base address for the whole range.
  if (register_host_memory("Storage", address, bytes, registered_ + bytes) == address) {
    registered_ += bytes;
    return;
  }
  unregister_host_memory(index_, address);
  throw std::runtime_error(message("Storage",
                                   "the device maps host memory to other addresses than the "
                                   "host's, which pools that grow need to be the same"));
}

void CudaPinnedMemory::close(std::byte* address, std::size_t bytes) noexcept {
  if (owner_ != getpid()) return;
  registered_ -= bytes;
  const RelaxedCapture relaxed;
  unregister_host_memory(index_, address);
}

void CudaPinnedMemory::unmap(std::byte* address, std::size_t bytes) noexcept {
  if (owner_ == getpid()) FilledHostMemory::unmap(address, bytes);
}

void CudaPinnedMemory::release(std::byte* address, std::size_t bytes) noexcept {
  if (owner_ == getpid()) FilledHostMemory::release(address, bytes);
}

void CudaPinnedMemory::synchronize() {
  if (owner_ == getpid()) synchronize_device(index_);
}

std::shared_ptr<MemoryDriver> CudaBackend::memory_driver(MemoryKind kind, const Warn& warn) {
  if (kind == MemoryKind::kDevice) return std::make_shared<CudaDeviceMemory>(index_);
  return std::make_shared<CudaPinnedMemory>(index_, numa_node_, warn);
}

}  // namespace sparse_kvcm
