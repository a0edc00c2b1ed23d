#include "cuda/cuda_backend.hpp"

#include <cstring>
#include <memory>

#include "core/check.hpp"
#include "cuda/error.hpp"
#include "cuda/kernels.hpp"
#include "cuda/tuning.hpp"

namespace sparse_kvcm {
BufferPtr CudaBackend::allocate_device(std::size_t bytes) {
  const DeviceGuard guard(index_);
  return std::make_shared<DeviceBuffer>(bytes);
}

BufferPtr CudaBackend::allocate_pinned(std::size_t bytes, const PinnedOptions& options) {
  const DeviceGuard guard(index_);
  return std::make_shared<PinnedBuffer>(bytes, options, numa_node_);
}

void CudaBackend::upload(std::span<const Upload> uploads, Stream stream) {
  const DeviceGuard guard(index_);
  staging_.upload(uploads, cuda_stream(stream));
}

void CudaBackend::patch(std::int32_t* destination, std::span<const PatchRun> runs,
                        std::span<const std::int32_t> words, Stream stream) {
  if (runs.empty()) return;
  const DeviceGuard guard(index_);
  staging_.run(
      runs.size_bytes() + words.size_bytes(),
      [&](std::byte* staged, const std::byte* mapped) {
        std::memcpy(staged, runs.data(), runs.size_bytes());
        if (!words.empty()) {
          std::memcpy(staged + runs.size_bytes(), words.data(), words.size_bytes());
        }
        launch_patch(destination, reinterpret_cast<const PatchRun*>(mapped),
                     static_cast<std::int64_t>(runs.size()),
                     reinterpret_cast<const std::int32_t*>(mapped + runs.size_bytes()),
                     cuda_stream(stream));
      },
      cuda_stream(stream));
}

void CudaBackend::copy_pages(const PageCopy& copy, Stream stream) {
  const DeviceGuard guard(index_);
  launch_copy_pages(copy, cuda_stream(stream));
}

void CudaBackend::download(Buffer& destination, const std::byte* source, std::size_t bytes,
                           Stream stream) {
  if (bytes > destination.bytes()) {
    fail_argument("Backend.download", "bytes must be at most the destination's ",
                  destination.bytes(), ", got ", bytes);
  }
  if (bytes == 0) return;
  const DeviceGuard guard(index_);
  SPARSE_KVCM_CUDA_CHECK(cudaMemcpyAsync(destination.data(), source, bytes, cudaMemcpyDeviceToHost,
                                         cuda_stream(stream)));
}

void CudaBackend::clear(std::byte* destination, std::size_t bytes, Stream stream) {
  if (bytes == 0) return;
  const DeviceGuard guard(index_);
  SPARSE_KVCM_CUDA_CHECK(cudaMemsetAsync(destination, 0, bytes, cuda_stream(stream)));
}

EventPtr CudaBackend::record(Stream stream) {
  const DeviceGuard guard(index_);
  const auto event = std::make_shared<CudaEvent>();
  event->record(cuda_stream(stream));
  return event;
}

void CudaBackend::wait(Stream stream, const Event& event) {
  const DeviceGuard guard(index_);
  const auto& recorded = static_cast<const CudaEvent&>(event);
  SPARSE_KVCM_CUDA_CHECK(cudaStreamWaitEvent(cuda_stream(stream), recorded.get(), 0));
}

void CudaBackend::synchronize(const Event& event) {
  const DeviceGuard guard(index_);
  SPARSE_KVCM_CUDA_CHECK(cudaEventSynchronize(static_cast<const CudaEvent&>(event).get()));
}

bool CudaBackend::is_done(const Event& event) const {
  const DeviceGuard guard(index_);
  return static_cast<const CudaEvent&>(event).done();
}

bool CudaBackend::is_capturing(Stream stream) const {
  const DeviceGuard guard(index_);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t result = cudaStreamIsCapturing(cuda_stream(stream), &status);
  if (result == cudaErrorStreamCaptureImplicit) {
    // The default stream, asked while another stream captures: its work would end the capture.
    static_cast<void>(cudaGetLastError());
    return true;
  }
  check_cuda(result, "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

void CudaBackend::resolve(const ops::ResolveParams& params, Stream stream) {
  const DeviceGuard guard(index_);
  launch_resolve(params, planner_.plan(params), cuda_stream(stream));
}

void CudaBackend::fetch(const ops::FetchParams& params, Stream stream) {
  const DeviceGuard guard(index_);
  const ops::Piece& last = params.memory.pieces.back();  // pieces lie one behind the other
  launch_fetch(params, rows_in_flight(last.host_offset + last.bytes), cuda_stream(stream));
}

void CudaBackend::move_units(const ops::MoveParams& params, Stream stream) {
  const DeviceGuard guard(index_);
  launch_move_units(params, cuda_stream(stream));
}

void CudaBackend::reset_leases(const ops::ResetParams& params, Stream stream) {
  const DeviceGuard guard(index_);
  launch_reset_leases(params, cuda_stream(stream));
}

void CudaBackend::convert(const ops::ConvertParams& params, Stream stream) {
  const DeviceGuard guard(index_);
  launch_convert(params, cuda_stream(stream));
}

}  // namespace sparse_kvcm
