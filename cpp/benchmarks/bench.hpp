// The benchmark harness. One program runs all cases; a case is registered where it is written:
//
//   const bench::Registration kResolve("resolve", "b151_k2048_n4096", [](bench::Context& context) {
//     Fixture fixture(context.device());                     // not timed
//     const double seconds = context.median_seconds([&] { fixture.resolve(); });
//     return bench::time_ms(seconds, fixture.bytes() / context.copy_rate());
//   });
//
// A figure stands beside the limit that the machine sets, measured in the same run: for work that
// moves bytes, what a plain copy of them would take.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "sparse_kvcm/types.hpp"

namespace sparse_kvcm::bench {

struct Measurement {
  double value = 0;
  std::string unit;
  std::optional<double> limit;  // in `unit`
  std::optional<double> share;  // of the limit that was reached: 1 is the machine's best
};

// A time against the least time the machine would need, both in seconds.
[[nodiscard]] Measurement time_ms(double seconds, std::optional<double> limit_seconds);
// A time in microseconds, both in seconds.
[[nodiscard]] Measurement time_us(double seconds, std::optional<double> limit_seconds);
// A rate against the machine's, both in bytes per second.
[[nodiscard]] Measurement rate_gb_per_s(double rate, std::optional<double> limit_rate);

class Context {
 public:
  explicit Context(Device device) : device_(device) {}

  [[nodiscard]] Device device() const { return device_; }
  // Throws NotAvailable, which skips the case, on another kind of device.
  void require(DeviceKind kind) const;

  // Median wall time of `call`, over at least 7 calls and 0.5 s, after 2 that are not counted.
  // On a GPU each call counts until its work on stream 0 has run.
  [[nodiscard]] double median_seconds(const std::function<void()>& call) const;

  // Median of what `sample` returns, over `calls` calls after 2 that are not counted: for cases
  // that time a part of what they do themselves, such as what the host alone pays.
  [[nodiscard]] static double median_of(std::int32_t calls, const std::function<double()>& sample);

  // Bytes per second of a plain copy of host memory far larger than the caches, on one core;
  // each byte counts once. Measured at first use.
  [[nodiscard]] double copy_rate();

 private:
  Device device_;
  std::optional<double> copy_rate_;
};

// Wall time of `call` on the host.
[[nodiscard]] double host_seconds(const std::function<void()>& call);

using Function = std::function<Measurement(Context&)>;

// Adds a case to the program. Names are of letters, digits, '_', '.' and '-'.
class Registration {
 public:
  Registration(std::string bench, std::string name, Function run);
};

}  // namespace sparse_kvcm::bench
