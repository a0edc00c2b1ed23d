// Virtual memory that notes its calls and fails on demand, over the CPU's.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "backend/backend.hpp"
#include "faulty_backend.hpp"

namespace sparse_kvcm::testing {

// Shared by all drivers of one backend.
struct MemoryLog {
  std::string calls;            // m: map, u: unmap, f: fill, s: synchronize; one letter per granule
  std::int64_t maps_left = -1;  // the granule after so many more fails, once; -1 = none
  bool synchronize_fails = false;
  std::int64_t mapped = 0;  // granules
  std::mutex mutex;         // of what is open
  std::map<std::uintptr_t, std::size_t> open;
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
  void map(std::byte* address, std::size_t bytes, std::size_t granule) override {
    const auto granules = static_cast<std::int64_t>(bytes / granule);
    if (log_->maps_left >= 0 &&
        std::exchange(log_->maps_left, log_->maps_left - granules) < granules) {
      log_->maps_left = -1;
      throw std::bad_alloc();
    }
    real_->map(address, bytes, granule);
    log_->calls.append(bytes / granule, 'm');
    log_->mapped += granules;
  }
  void unmap(std::byte* address, std::size_t bytes, std::size_t granule) noexcept override {
    const auto end = reinterpret_cast<std::uintptr_t>(address) + bytes;
    const auto open = log_->open.lower_bound(end - bytes);
    EXPECT_TRUE(open == log_->open.end() || open->first >= end) << "unmapped while open";
    real_->unmap(address, bytes, granule);
    log_->calls.append(bytes / granule, 'u');
    log_->mapped -= static_cast<std::int64_t>(bytes / granule);
  }
  // No page of the system is ever opened twice: a driver refuses to pin it again.
  void note_open(std::uintptr_t begin, std::size_t bytes) {
    const std::lock_guard lock(log_->mutex);
    EXPECT_EQ(begin % granularity(), 0U);
    const auto next = log_->open.lower_bound(begin);
    EXPECT_TRUE(next == log_->open.end() || next->first >= begin + bytes);
    if (next != log_->open.begin()) {
      const auto& [before, size] = *std::prev(next);
      EXPECT_LE(before + size, begin);
    }
    log_->open.emplace(begin, bytes);
  }
  void announce(std::byte* address, std::size_t bytes) override { real_->announce(address, bytes); }
  void touch(std::byte* address, std::size_t bytes) override {
    if (!on_fill) real_->touch(address, bytes);
  }
  void open(std::byte* address, std::size_t bytes) override {
    if (on_fill) return on_fill();
    real_->open(address, bytes);
    note_open(reinterpret_cast<std::uintptr_t>(address), bytes);
  }
  void close(std::byte* address, std::size_t bytes) noexcept override {
    real_->close(address, bytes);
    const std::lock_guard lock(log_->mutex);
    if (on_fill) return;
    EXPECT_EQ(log_->open[reinterpret_cast<std::uintptr_t>(address)], bytes);
    log_->open.erase(reinterpret_cast<std::uintptr_t>(address));
  }
  [[nodiscard]] std::size_t most_opened() const override { return std::size_t{1} << 30; }
  void synchronize() override {
    if (log_->synchronize_fails) throw DeviceFault();
    log_->calls += 's';
  }

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
