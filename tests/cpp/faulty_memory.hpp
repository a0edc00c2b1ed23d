// Virtual memory that notes its calls and fails on demand, over the CPU's.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "backend/backend.hpp"
#include "faulty_backend.hpp"

namespace sparse_kvcm::testing {

// Shared by all drivers of one backend.
struct MemoryLog {
  std::string calls;            // m: map, u: unmap, f: fill, s: synchronize; one letter per call
  std::int64_t maps_left = -1;  // the map after so many more fails, once; -1 = none
  std::int64_t mapped = 0;      // granules
};

class FaultyMemory final : public MemoryDriver {
 public:
  FaultyMemory(std::shared_ptr<MemoryDriver> real, std::shared_ptr<MemoryLog> log)
      : real_(std::move(real)), log_(std::move(log)) {}

  // What opening a granule does, if memory is filled; runs on the filler's thread.
  std::function<void()> on_fill;

  [[nodiscard]] std::size_t granularity() const override { return real_->granularity(); }
  [[nodiscard]] bool is_host_memory() const override { return true; }
  [[nodiscard]] bool needs_fill() const override { return on_fill || real_->needs_fill(); }
  [[nodiscard]] std::byte* reserve(std::size_t bytes, std::size_t alignment) override {
    return real_->reserve(bytes, alignment);
  }
  void release(std::byte* address, std::size_t bytes) noexcept override {
    real_->release(address, bytes);
  }
  void map(std::byte* address, std::size_t bytes) override {
    if (log_->maps_left >= 0 && log_->maps_left-- == 0) throw std::bad_alloc();
    real_->map(address, bytes);
    log_->calls += 'm';
    ++log_->mapped;
  }
  void unmap(std::byte* address, std::size_t bytes) noexcept override {
    real_->unmap(address, bytes);
    log_->calls += 'u';
    --log_->mapped;
  }
  void announce(std::byte* address, std::size_t bytes) override { real_->announce(address, bytes); }
  void touch(std::byte* address, std::size_t bytes) override {
    if (!on_fill) real_->touch(address, bytes);
  }
  void open(std::byte* address, std::size_t bytes) override {
    if (on_fill) return on_fill();
    real_->open(address, bytes);
  }
  void close(std::byte* address, std::size_t bytes) noexcept override {
    real_->close(address, bytes);
  }
  [[nodiscard]] std::size_t most_opened() const override { return std::size_t{1} << 30; }
  void synchronize() override { log_->calls += 's'; }

 private:
  std::shared_ptr<MemoryDriver> real_;
  std::shared_ptr<MemoryLog> log_;
};

// The CPU with such memory.
class FaultyMemoryBackend final : public FaultyBackend {
 public:
  [[nodiscard]] std::shared_ptr<MemoryDriver> memory_driver(MemoryKind kind,
                                                            const Warn& warn) override {
    auto driver = std::make_shared<FaultyMemory>(FaultyBackend::memory_driver(kind, warn), log);
    if (kind == MemoryKind::kPinned) driver->on_fill = on_fill;
    return driver;
  }
  std::function<void()> on_fill;  // of pinned memory
  const std::shared_ptr<MemoryLog> log = std::make_shared<MemoryLog>();
};

}  // namespace sparse_kvcm::testing
