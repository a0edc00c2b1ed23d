// A CPU backend whose device fails on demand, half-way through its work.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>

#include "backend/backend.hpp"
#include "manager/manager_state.hpp"
#include "sparse_kvcm/kv_cache_manager.hpp"

namespace sparse_kvcm::testing {

struct DeviceFault : std::runtime_error {
  DeviceFault() : std::runtime_error("the device failed") {}
};

class FaultyBackend : public Backend {
 public:
  // The call after `calls` more calls fails, once.
  void fail_after(std::int64_t calls) { left_ = calls; }
  // Returns whether a fault that was ordered is still to come, and withdraws it.
  bool withdraw() {
    const bool pending = left_ >= 0;
    left_ = -1;
    return pending;
  }
  void set_capturing(std::optional<Stream> stream) { capturing_ = stream; }

  [[nodiscard]] Device device() const override { return cpu_->device(); }
  [[nodiscard]] BufferPtr allocate_device(std::size_t bytes) override {
    step();
    return cpu_->allocate_device(bytes);
  }
  [[nodiscard]] BufferPtr allocate_pinned(std::size_t bytes) override {
    step();
    return cpu_->allocate_pinned(bytes);
  }
  [[nodiscard]] std::shared_ptr<MemoryDriver> memory_driver(MemoryKind kind) override {
    return cpu_->memory_driver(kind);
  }
  void upload(std::span<const Upload> uploads, Stream stream) override {
    if (left_ == 0) cpu_->upload(uploads.first(uploads.size() / 2), stream);
    step();
    cpu_->upload(uploads, stream);
  }
  void download(Buffer& destination, const std::byte* source, std::size_t bytes,
                Stream stream) override {
    step();
    cpu_->download(destination, source, bytes, stream);
  }
  void clear(std::byte* destination, std::size_t bytes, Stream stream) override {
    step();
    cpu_->clear(destination, bytes, stream);
  }
  [[nodiscard]] EventPtr record(Stream stream) override {
    step();
    return cpu_->record(stream);
  }
  void wait(Stream stream, const Event& event) override {
    step();
    cpu_->wait(stream, event);
  }
  void synchronize(const Event& event) override {
    step();
    cpu_->synchronize(event);
  }
  [[nodiscard]] bool is_done(const Event& event) const override { return cpu_->is_done(event); }
  [[nodiscard]] bool is_capturing(Stream stream) const override { return capturing_ == stream; }

  void resolve(const ops::ResolveParams& params, Stream stream) override {
    step();
    cpu_->resolve(params, stream);
  }
  void fetch(const ops::FetchParams& params, Stream stream) override {
    step();
    cpu_->fetch(params, stream);
  }
  void move_units(const ops::MoveParams& params, Stream stream) override {
    ops::MoveParams half = params;
    half.moves = params.moves.first(params.moves.size() / 2);
    if (left_ == 0) cpu_->move_units(half, stream);
    step();
    cpu_->move_units(params, stream);
  }
  void convert(const ops::ConvertParams& params, Stream stream) override {
    step();
    cpu_->convert(params, stream);
  }
  void reset_leases(const ops::ResetParams& params, Stream stream) override {
    ops::ResetParams half = params;
    half.leases = params.leases.first(params.leases.size() / 2);
    if (left_ == 0) cpu_->reset_leases(half, stream);
    step();
    cpu_->reset_leases(params, stream);
  }

 private:
  void step() {
    if (left_ >= 0 && left_-- == 0) throw DeviceFault();
  }

  std::shared_ptr<Backend> cpu_ = backend_for({});
  std::int64_t left_ = -1;
  std::optional<Stream> capturing_;
};

// A manager on `backend`.
[[nodiscard]] inline std::unique_ptr<KvCacheManager> make_manager(
    const KvCacheManagerConfig& config, const std::shared_ptr<Backend>& backend) {
  check(config);
  return std::make_unique<KvCacheManager>(std::make_shared<ManagerState>(config, backend));
}

}  // namespace sparse_kvcm::testing
