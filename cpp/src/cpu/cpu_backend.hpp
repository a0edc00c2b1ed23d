// The CPU backend: plain loops over host memory. It is the reference and the oracle of the other
// backends, and what runs on a machine without a GPU. Every call runs to its end before it returns,
// so streams and events are empty words here.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "backend/backend.hpp"

namespace sparse_kvcm {

class CpuBackend final : public Backend {
 public:
  [[nodiscard]] Device device() const override { return {DeviceKind::kCpu, 0}; }

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
};

}  // namespace sparse_kvcm
