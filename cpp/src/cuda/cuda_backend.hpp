// The CUDA backend: host side. Kernels are in .cu files behind the launchers of kernels.hpp.
// Every call makes its device current and puts back what was; work goes to the caller's stream.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "backend/backend.hpp"
#include "cuda/pinned_buffer.hpp"
#include "cuda/resolve_plan.hpp"
#include "cuda/staging.hpp"

namespace sparse_kvcm {

class CudaBackend final : public Backend {
 public:
  // REQUIRES: the device exists.
  explicit CudaBackend(std::int32_t index) : index_(index), numa_node_(gpu_numa_node(index)) {}

  [[nodiscard]] Device device() const override { return {DeviceKind::kCuda, index_}; }

  [[nodiscard]] BufferPtr allocate_device(std::size_t bytes) override;
  [[nodiscard]] BufferPtr allocate_pinned(std::size_t bytes, const PinnedOptions& options) override;
  [[nodiscard]] std::shared_ptr<MemoryDriver> memory_driver(MemoryKind kind,
                                                            const Warn& warn) override;

  void upload(std::span<const Upload> uploads, Stream stream) override;
  void patch(std::int32_t* destination, std::span<const PatchRun> runs,
             std::span<const std::int32_t> words, Stream stream) override;
  void copy_pages(const PageCopy& copy, Stream stream) override;
  void download(Buffer& destination, const std::byte* source, std::size_t bytes,
                Stream stream) override;
  void clear(std::byte* destination, std::size_t bytes, Stream stream) override;

  [[nodiscard]] EventPtr record(Stream stream) override;
  void wait(Stream stream, const Event& event) override;
  void synchronize(const Event& event) override;
  [[nodiscard]] bool is_done(const Event& event) const override;
  [[nodiscard]] bool is_capturing(Stream stream) const override;

  void resolve(const ops::ResolveParams& params, Stream stream) override;
  void fetch(const ops::FetchParams& params, Stream stream) override;
  void move_units(const ops::MoveParams& params, Stream stream) override;
  void convert(const ops::ConvertParams& params, Stream stream) override;
  void reset_leases(const ops::ResetParams& params, Stream stream) override;

 private:
  std::int32_t index_;
  int numa_node_;
  ResolvePlanner planner_;
  Staging staging_;
};

}  // namespace sparse_kvcm
