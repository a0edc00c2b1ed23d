// Host memory from nothing to pinned: mapped, touched, registered. Giving it back is not timed.
// The limit is the rate at which all cores together touch fresh huge pages by plain stores.
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <thread>
#include <vector>

#include "bench.hpp"
#include "core/check.hpp"
#include "core/host_advice.hpp"
#include "core/host_limits.hpp"
#include "sparse_kvcm/storage.hpp"

namespace sparse_kvcm::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kPage = 4096;
constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr std::size_t kGiB = std::size_t{1} << 30;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// Bytes per second. REQUIRES: bytes are whole huge pages.
double touch_rate(std::size_t bytes) {
  const std::size_t cores = std::max(1U, std::thread::hardware_concurrency());
  const std::size_t share = (bytes / kHugePage + cores - 1) / cores * kHugePage;
  const std::size_t mapped = bytes + kHugePage;
  void* const memory =
      mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw NotAvailable("[bench] mmap failed");
  static_cast<void>(madvise(memory, mapped, MADV_HUGEPAGE));
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  std::byte* const data = static_cast<std::byte*>(memory) + (kHugePage - address % kHugePage);
  const auto begin = Clock::now();
  {
    std::vector<std::jthread> threads;
    for (std::size_t first = 0; first < bytes; first += share) {
      const std::size_t size = std::min(share, bytes - first);
      threads.emplace_back([=] {
        for (std::size_t at = first; at < first + size; at += kPage) {
          *static_cast<volatile std::byte*>(data + at) = std::byte{0};
        }
      });
    }
  }
  const double seconds = seconds_since(begin);
  static_cast<void>(munmap(memory, mapped));
  return static_cast<double>(bytes) / seconds;
}

// Of host history as a manager makes it.
double pin_rate(Device device, std::size_t bytes) {
  StorageConfig config;
  config.device = device;
  config.cache_tiers = {{CacheTier::kGpuMem, 1, 0},
                        {CacheTier::kHostMem, static_cast<std::int64_t>(bytes), 0}};
  const UnitLayout layout({576});
  config.layers = {{0, {{"KEY", layout.page_bytes(64), {}, true}}, {}, {}}};
  config.selection_groups = {{{0}, 64, layout}};
  const auto begin = Clock::now();
  const Storage storage(config, {StorageFill::kAtOnce, nullptr, "benchmark"});
  const double seconds = seconds_since(begin);
  return static_cast<double>(storage.get_num_bytes(kSparseHistoryLevel)) / seconds;
}

template <class Call>
double median_rate(int calls, Call call) {
  std::vector<double> rates;
  for (int i = 0; i < calls; ++i) rates.push_back(call());
  std::nth_element(rates.begin(), rates.begin() + calls / 2, rates.end());
  return rates[static_cast<std::size_t>(calls / 2)];
}

void require_memory(std::size_t bytes) {
  try {
    check_host_memory("bench", bytes, read_host_limits());
  } catch (const HostMemoryError& error) {
    throw NotAvailable(error.what());
  }
}

const Registration k64GiB("pin", "64gib", [](Context& context) {
  context.require(DeviceKind::kCuda);
  require_memory(72 * kGiB);  // with some to spare for the rest of the machine
  const double limit = touch_rate(16 * kGiB);
  // In a virtual machine the first of these also waits until the host backs the memory.
  return rate_gb_per_s(median_rate(3, [&] { return pin_rate(context.device(), 64 * kGiB); }),
                       limit);
});

const Registration k256MiB("pin", "map_256mib", [](Context& context) {
  context.require(DeviceKind::kCpu);
  constexpr int kCalls = 9;
  const double limit = median_rate(kCalls, [] { return touch_rate(256 * kMiB); });
  return rate_gb_per_s(median_rate(kCalls, [&] { return pin_rate(context.device(), 256 * kMiB); }),
                       limit);
});

}  // namespace
}  // namespace sparse_kvcm::bench
