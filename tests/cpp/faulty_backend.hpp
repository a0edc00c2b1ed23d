// A backend whose device fails on demand, half-way through its work, and whose device memory the
// host sees (shared_memory.hpp), so that a test can look at what an engine did on any device.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>

#include "backend/backend.hpp"
#include "manager/manager_state.hpp"
#include "shared_memory.hpp"
#include "sparse_kvcm/kv_cache_manager.hpp"

namespace sparse_kvcm::testing {

struct DeviceFault : std::runtime_error {
  DeviceFault() : std::runtime_error("the device failed") {}
};

class FaultyBackend : public Backend {
 public:
  explicit FaultyBackend(Device device = {}) : inner_(backend_for(device)) {}

  // Waits until `stream` has done its work: from then on the host may touch what it worked on.
  void settle(Stream stream = 0) { inner_->synchronize(*inner_->record(stream)); }
  // The call after `calls` more calls fails, once.
  void fail_after(std::int64_t calls) { left_ = calls; }
  // That call and all after it fail, until the fault is withdrawn.
  void fail_for_good_after(std::int64_t calls) {
    left_ = calls;
    for_good_ = true;
  }
  // Returns whether a fault that was ordered is still to come, and withdraws it.
  bool withdraw() {
    const bool pending = left_ >= 0;
    left_ = -1;
    for_good_ = false;
    return pending;
  }
  // What every pinned allocation warns of from now on.
  void set_warning(const std::string& warning) { warning_ = warning; }
  void set_capturing(std::optional<Stream> stream) { capturing_ = stream; }

  [[nodiscard]] Device device() const override { return inner_->device(); }
  [[nodiscard]] BufferPtr allocate_device(std::size_t bytes) override {
    step();
    return make_shared_buffer(device(), bytes);
  }
  [[nodiscard]] BufferPtr allocate_pinned(std::size_t bytes,
                                          const PinnedOptions& options) override {
    step();
    if (options.warn && !warning_.empty()) options.warn(warning_);
    return device().kind == DeviceKind::kCpu ? inner_->allocate_pinned(bytes, options)
                                             : make_shared_buffer(device(), bytes);
  }
  [[nodiscard]] std::shared_ptr<MemoryDriver> memory_driver(MemoryKind kind,
                                                            const Warn& warn) override {
    if (kind == MemoryKind::kPinned && warn && !warning_.empty()) warn(warning_);
    return inner_->memory_driver(kind, warn);
  }
  void upload(std::span<const Upload> uploads, Stream stream) override {
    if (left_ == 0) inner_->upload(uploads.first(uploads.size() / 2), stream);
    step();
    inner_->upload(uploads, stream);
  }
  void patch(std::int32_t* destination, std::span<const PatchRun> runs,
             std::span<const std::int32_t> words, Stream stream) override {
    if (left_ == 0) inner_->patch(destination, runs.first(runs.size() / 2), words, stream);
    step();
    inner_->patch(destination, runs, words, stream);
  }
  void copy_pages(const PageCopy& copy, Stream stream) override {
    PageCopy half = copy;
    half.pages = copy.pages.first(copy.pages.size() / 2);
    if (left_ == 0 && !half.pages.empty()) inner_->copy_pages(half, stream);
    step();
    inner_->copy_pages(copy, stream);
  }
  void download(Buffer& destination, const std::byte* source, std::size_t bytes,
                Stream stream) override {
    step();
    inner_->download(destination, source, bytes, stream);
  }
  void clear(std::byte* destination, std::size_t bytes, Stream stream) override {
    step();
    inner_->clear(destination, bytes, stream);
  }
  [[nodiscard]] EventPtr record(Stream stream) override {
    step();
    return inner_->record(stream);
  }
  void wait(Stream stream, const Event& event) override {
    step();
    inner_->wait(stream, event);
  }
  void synchronize(const Event& event) override {
    step();
    inner_->synchronize(event);
  }
  [[nodiscard]] bool is_done(const Event& event) const override { return inner_->is_done(event); }
  [[nodiscard]] bool is_capturing(Stream stream) const override {
    return capturing_ ? capturing_ == stream : inner_->is_capturing(stream);
  }

  void resolve(const ops::ResolveParams& params, Stream stream) override {
    step();
    inner_->resolve(params, stream);
  }
  void fetch(const ops::FetchParams& params, Stream stream) override {
    step();
    inner_->fetch(params, stream);
  }
  void move_units(const ops::MoveParams& params, Stream stream) override {
    ops::MoveParams half = params;
    half.moves = params.moves.first(params.moves.size() / 2);
    if (left_ == 0) inner_->move_units(half, stream);
    step();
    inner_->move_units(params, stream);
  }
  void convert(const ops::ConvertParams& params, Stream stream) override {
    step();
    inner_->convert(params, stream);
  }
  void reset_leases(const ops::ResetParams& params, Stream stream) override {
    ops::ResetParams half = params;
    half.leases = params.leases.first(params.leases.size() / 2);
    if (left_ == 0) inner_->reset_leases(half, stream);
    step();
    inner_->reset_leases(params, stream);
  }

 private:
  void step() {
    if (left_ < 0) return;
    if (left_ == 0 && for_good_) throw DeviceFault();
    if (left_-- == 0) throw DeviceFault();
  }

  std::shared_ptr<Backend> inner_;
  std::int64_t left_ = -1;
  bool for_good_ = false;
  std::string warning_;
  std::optional<Stream> capturing_;
};

// A manager on `backend`.
[[nodiscard]] inline std::unique_ptr<KvCacheManager> make_manager(
    const KvCacheManagerConfig& config, const std::shared_ptr<Backend>& backend) {
  check(config);
  return std::make_unique<KvCacheManager>(std::make_shared<ManagerState>(config, backend));
}

}  // namespace sparse_kvcm::testing
