#include "bench.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>
#include <vector>

#include "backend/backend.hpp"
#include "registry.hpp"
#include "sparse_kvcm/error.hpp"

namespace sparse_kvcm::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kWarmUps = 2;
constexpr int kLeastCalls = 7;
constexpr double kLeastSeconds = 0.5;
constexpr std::size_t kCopyBytes = std::size_t{256} << 20;

double seconds_of(const std::function<void()>& call, Backend& backend) {
  return host_seconds([&] {
    call();
    backend.synchronize(*backend.record(0));
  });
}

double median(std::vector<double>& times) {
  const auto middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
  std::nth_element(times.begin(), middle, times.end());
  return *middle;
}

}  // namespace

std::vector<Case>& registry() {
  static std::vector<Case> cases;
  return cases;
}

std::function<void(Context&)>& fetch_sweep() {
  static std::function<void(Context&)> sweep;
  return sweep;
}

Registration::Registration(std::string bench, std::string name, Function run) {
  registry().push_back({std::move(bench), std::move(name), std::move(run)});
}

Measurement time_ms(double seconds, std::optional<double> limit_seconds) {
  Measurement result{seconds * 1e3, "ms", {}, {}};
  if (limit_seconds) {
    result.limit = *limit_seconds * 1e3;
    result.share = *limit_seconds / seconds;
  }
  return result;
}

Measurement time_us(double seconds, std::optional<double> limit_seconds) {
  Measurement result{seconds * 1e6, "us", {}, {}};
  if (limit_seconds) {
    result.limit = *limit_seconds * 1e6;
    result.share = *limit_seconds / seconds;
  }
  return result;
}

double host_seconds(const std::function<void()>& call) {
  const auto begin = Clock::now();
  call();
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

Measurement rate_gb_per_s(double rate, std::optional<double> limit_rate) {
  Measurement result{rate * 1e-9, "GB/s", {}, {}};
  if (limit_rate) {
    result.limit = *limit_rate * 1e-9;
    result.share = rate / *limit_rate;
  }
  return result;
}

void Context::require(DeviceKind kind) const {
  if (device_.kind == kind) return;
  throw NotAvailable(kind == DeviceKind::kCuda ? "[bench] only with --device cuda"
                                               : "[bench] only with --device cpu");
}

double Context::median_seconds(const std::function<void()>& call) const {
  const auto backend = backend_for(device_);
  for (int i = 0; i < kWarmUps; ++i) seconds_of(call, *backend);

  std::vector<double> times;
  double total = 0;
  while (times.size() < kLeastCalls || total < kLeastSeconds) {
    times.push_back(seconds_of(call, *backend));
    total += times.back();
  }
  return median(times);
}

double Context::median_of(std::int32_t calls, const std::function<double()>& sample) {
  for (int i = 0; i < kWarmUps; ++i) sample();
  std::vector<double> times;
  while (std::cmp_less(times.size(), calls)) times.push_back(sample());
  return median(times);
}

double Context::copy_rate() {
  if (!copy_rate_) {
    const std::vector<std::byte> source(kCopyBytes, std::byte{1});
    std::vector<std::byte> destination(kCopyBytes);
    const double seconds = Context({}).median_seconds(
        [&] { std::memcpy(destination.data(), source.data(), kCopyBytes); });
    copy_rate_ = static_cast<double>(kCopyBytes) / seconds;
  }
  return *copy_rate_;
}

}  // namespace sparse_kvcm::bench
