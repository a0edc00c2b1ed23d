#include "cuda/handles.hpp"

#include "cuda/error.hpp"

namespace sparse_kvcm {

DeviceGuard::DeviceGuard(std::int32_t index) {
  SPARSE_KVCM_CUDA_CHECK(cudaGetDevice(&previous_));
  SPARSE_KVCM_CUDA_CHECK(cudaSetDevice(index));
}

DeviceGuard::~DeviceGuard() { static_cast<void>(cudaSetDevice(previous_)); }

CudaEvent::CudaEvent() {
  SPARSE_KVCM_CUDA_CHECK(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming));
}

CudaEvent::~CudaEvent() { static_cast<void>(cudaEventDestroy(event_)); }

void CudaEvent::record(cudaStream_t stream) {
  SPARSE_KVCM_CUDA_CHECK(cudaEventRecord(event_, stream));
}

bool CudaEvent::done() const {
  const cudaError_t status = cudaEventQuery(event_);
  if (status == cudaErrorNotReady) return false;
  check_cuda(status, "cudaEventQuery");
  return true;
}

DeviceBuffer::DeviceBuffer(std::size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  void* memory = nullptr;
  cudaError_t status = cudaMalloc(&memory, bytes);
  if (status == cudaErrorMemoryAllocation) {
    static_cast<void>(cudaGetLastError());
    fail_device_bytes("Backend.allocate_device", "a buffer", bytes);
  }
  check_cuda(status, "cudaMalloc");
  // On the legacy stream, and waited for: later work on any stream finds zeros.
  status = cudaMemset(memory, 0, bytes);
  if (status == cudaSuccess) status = cudaStreamSynchronize(cudaStreamLegacy);
  if (status != cudaSuccess) static_cast<void>(cudaFree(memory));
  check_cuda(status, "cudaMemset");
  data_ = static_cast<std::byte*>(memory);
}

DeviceBuffer::~DeviceBuffer() {
  if (data_ != nullptr) static_cast<void>(cudaFree(data_));
}

}  // namespace sparse_kvcm
