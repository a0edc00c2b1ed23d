// Sweeps fetch's rows in flight over the bytes of a host row and over how far apart misses lie,
// alone and in runs of 4, on 151 requests of 32,768 units.
#include <algorithm>
#include <iostream>
#include <vector>

#include "cuda/decode_state.hpp"
#include "cuda/kernels.hpp"
#include "cuda/tuning.hpp"
#include "registry.hpp"

namespace sparse_kvcm::bench {
namespace {

constexpr std::int32_t kUnits = 32'768;
constexpr double kReplayBytes = 500e6;  // of one replay: more than the host's caches hold
constexpr int kReplays = 7;

// Host rows and how many pools of them, so that each size reads 8 GB or more.
struct Rows {
  std::int32_t members, unit_bytes, pools;
};
constexpr Rows kRows[] = {{1, 576, 3}, {1, 1152, 2}, {4, 576, 1}};
constexpr std::int32_t kMisses[] = {600, 400, 275, 190, 113, 64};  // of a request
constexpr std::int32_t kRuns[] = {1, 4};
const std::vector<std::int32_t> kInFlight{192, 256, 320, 384, 448, 512, 640, 768};

double seconds_per_launch(const DecodeState& state, std::int32_t steps, std::int32_t in_flight) {
  const BenchStream stream;
  const std::int32_t groups = state.shape().groups;
  const double seconds = median_replay_seconds(
      stream,
      [&] {
        for (std::int32_t step = 0; step < steps; ++step) {
          for (std::int32_t group = 0; group < groups; ++group) {
            launch_fetch(state.fetch_params(step, group), in_flight, stream.get());
          }
        }
      },
      [] {}, kReplays);
  return seconds / steps / groups;
}

void sweep_misses(DecodeState& state, std::int32_t misses, std::int32_t run) {
  const DecodeShape& shape = state.shape();
  const std::int32_t row_bytes = shape.members * shape.unit_bytes;
  const double launch_bytes = static_cast<double>(shape.b) * misses * row_bytes;
  const auto steps = static_cast<std::int32_t>(
      std::clamp(kReplayBytes / (launch_bytes * shape.groups), 2.0, 64.0));
  for (std::int32_t step = 0; step < steps; ++step) {
    for (std::int32_t group = 0; group < shape.groups; ++group) {
      state.set_misses(step, group, misses, run,
                       static_cast<std::uint64_t>(step * shape.groups + group));
    }
  }
  const std::int64_t gap_bytes = std::int64_t{kUnits} * row_bytes / misses;
  const std::int32_t present = rows_in_flight(row_bytes);
  std::vector<std::int32_t> points = kInFlight;
  if (std::find(points.begin(), points.end(), present) == points.end()) points.push_back(present);
  for (const std::int32_t in_flight : points) {
    const double seconds = seconds_per_launch(state, steps, in_flight);
    std::cout << "{\"row_bytes\": " << row_bytes << ", \"gap_bytes\": " << gap_bytes
              << ", \"run\": " << run << ", \"in_flight\": " << in_flight
              << ", \"present\": " << (in_flight == present ? "true" : "false")
              << ", \"us\": " << seconds * 1e6 << "}" << std::endl;
  }
}

const SweepRegistration kSweep([](Context& context) {
  for (const Rows& rows : kRows) {
    DecodeState state(context.device(), {.b = 151,
                                         .units = kUnits,
                                         .groups = rows.pools,
                                         .members = rows.members,
                                         .unit_bytes = rows.unit_bytes,
                                         .host_groups = rows.pools});
    for (const std::int32_t run : kRuns) {
      for (const std::int32_t misses : kMisses) sweep_misses(state, misses, run);
    }
  }
});

}  // namespace
}  // namespace sparse_kvcm::bench
