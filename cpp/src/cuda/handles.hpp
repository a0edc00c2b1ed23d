// Owners of CUDA objects. Destructors never throw, and stay silent when the driver is gone.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backend/backend.hpp"

namespace sparse_kvcm {

// Streams are integers at our surface. NOLINTNEXTLINE(performance-no-int-to-ptr)
inline cudaStream_t cuda_stream(Stream stream) { return reinterpret_cast<cudaStream_t>(stream); }

// Makes `index` the thread's current device for its own lifetime.
class DeviceGuard {
 public:
  explicit DeviceGuard(std::int32_t index);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
};

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

class CudaEvent final : public Event {
 public:
  CudaEvent();  // on the current device, without timing
  ~CudaEvent() override;
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  void record(cudaStream_t stream);
  [[nodiscard]] bool done() const;  // everything before the last record has run
  [[nodiscard]] cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

// Zeroed memory of the current device.
class DeviceBuffer final : public Buffer {
 public:
  explicit DeviceBuffer(std::size_t bytes);
  ~DeviceBuffer() override;
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  [[nodiscard]] std::byte* data() const override { return nullptr; }
  [[nodiscard]] std::byte* device_data() const override { return data_; }
  [[nodiscard]] std::size_t bytes() const override { return bytes_; }

 private:
  std::size_t bytes_;
  std::byte* data_ = nullptr;
};

}  // namespace sparse_kvcm
