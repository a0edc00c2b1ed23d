// resolve, fetch, the two together, and flush, at the shapes of GLM-5.2 and DeepSeek-V4 on one GPU.
//
// Replayed CUDA graphs. resolve cycles through the state of all groups, so its caches are as cold
// as in a model; fetch reads a history far larger than what address translation covers.
#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bench.hpp"
#include "cuda/decode_state.hpp"
#include "cuda/limits.hpp"

namespace sparse_kvcm::bench {
namespace {

// A case that only a GPU has.
class CudaRegistration : Registration {
 public:
  CudaRegistration(std::string bench, std::string name, Function run)
      : Registration(std::move(bench), std::move(name), [run = std::move(run)](Context& context) {
          context.require(DeviceKind::kCuda);
          return run(context);
        }) {}
};

constexpr std::int32_t kWarmSteps = 40;
constexpr std::int32_t kTraces = 16;

std::vector<Trace> drift_traces(const DecodeShape& shape, std::int32_t steps) {
  const TraceShape trace{shape.units - shape.window_slots, shape.k, steps};
  return make_traces(std::min(kTraces, shape.b * shape.groups),
                     [&](std::size_t i) { return drift_trace_glm51(trace, i); });
}

std::vector<Trace> renewal_traces(const DecodeShape& shape, std::int32_t steps,
                                  std::int32_t renewed) {
  const TraceShape trace{shape.units - shape.window_slots, shape.k, steps};
  return make_traces(std::min(kTraces, shape.b * shape.groups),
                     [&](std::size_t i) { return renewal_trace(trace, renewed, i); });
}

Measurement per_launch_us(double seconds, double launches, double limit_seconds) {
  return {seconds / launches * 1e6, "us", limit_seconds * 1e6, limit_seconds * launches / seconds};
}

// Bytes that one resolve must move: entries in and out, selection and slots, the misses.
double resolve_bytes(const DecodeShape& shape) {
  return shape.b * (8.0 * shape.cached_slots + 8.0 * shape.k + 16.0 * 0.1 * shape.k);
}

Measurement time_resolve(Context& context, const DecodeShape& shape,
                         const std::vector<Trace>& traces, std::int32_t kept) {
  DecodeState state(context.device(), shape);
  state.warm_up(traces, kept);
  const BenchStream stream;
  const double seconds = median_replay_seconds(
      stream,
      [&] {
        for (std::int32_t step = 0; step < kept; ++step) {
          for (std::int32_t group = 0; group < shape.groups; ++group) {
            state.resolve(step, group, stream);
          }
        }
      },
      [&] { state.restore(stream); });
  const double limit = empty_launch_seconds() + resolve_bytes(shape) / device_copy_rate();
  return per_launch_us(seconds, kept * shape.groups, limit);
}

Measurement resolve_drift(Context& context, const DecodeShape& shape, std::int32_t kept = 4) {
  return time_resolve(context, shape, drift_traces(shape, kWarmSteps + kept), kept);
}

const CudaRegistration kGlm("resolve", "glm",
                            [](Context& context) { return resolve_drift(context, {.b = 151}); });
const CudaRegistration kGlm128k("resolve", "glm_128k", [](Context& context) {
  return resolve_drift(context, {.b = 151, .units = 131'072});
});
const CudaRegistration kV4("resolve", "v4", [](Context& context) {
  return resolve_drift(context, {.b = 1500, .k = 512, .cached_slots = 2048, .units = 8192});
});
const CudaRegistration kB1("resolve", "b1",
                           [](Context& context) { return resolve_drift(context, {.b = 1}); });
const CudaRegistration k1m("resolve", "1m", [](Context& context) {
  const DecodeShape shape{.b = 16, .units = 1 << 20};
  return time_resolve(context, shape, renewal_traces(shape, 12, 205), 4);
});

// --- fetch ---

struct FetchCase {
  DecodeShape shape;
  std::int32_t misses = 0;
  std::int32_t run = 1;
};

// Miss lists of one replay read more than the host's caches hold.
constexpr double kReplayBytes = 700e6;

Measurement time_fetch(Context& context, const FetchCase& c) {
  DecodeShape shape = c.shape;
  shape.groups = shape.host_groups;
  const double launch_bytes =
      static_cast<double>(shape.b) * c.misses * shape.members * shape.unit_bytes;
  const auto steps = static_cast<std::int32_t>(
      std::clamp(kReplayBytes / (launch_bytes * shape.groups), 2.0, 64.0));
  DecodeState state(context.device(), shape);
  for (std::int32_t step = 0; step < steps; ++step) {
    for (std::int32_t group = 0; group < shape.groups; ++group) {
      state.set_misses(step, group, c.misses, c.run,
                       static_cast<std::uint64_t>(step * shape.groups + group));
    }
  }
  const BenchStream stream;
  const double seconds = median_replay_seconds(
      stream,
      [&] {
        for (std::int32_t step = 0; step < steps; ++step) {
          for (std::int32_t group = 0; group < shape.groups; ++group) {
            state.fetch(step, group, stream);
          }
        }
      },
      [] {});
  const double launches = static_cast<double>(steps) * shape.groups;
  const double bytes = launches * launch_bytes;
  if (shape.b == 1) {
    return per_launch_us(seconds, launches,
                         empty_launch_seconds() + bytes / launches / link_copy_rate());
  }
  return rate_gb_per_s(bytes / seconds, link_copy_rate());
}

const DecodeShape kGlmBytes{.b = 151, .members = 4, .host_groups = 2};
const DecodeShape kV32Bytes{.b = 151, .members = 1, .host_groups = 3};
const DecodeShape kV4Bytes{
    .b = 1500, .k = 512, .cached_slots = 2048, .units = 8192, .members = 1, .host_groups = 2};
const DecodeShape kOneRow{.b = 1, .members = 4, .host_groups = 8};

CudaRegistration fetch_case(const char* name, const FetchCase& c) {
  return {"fetch", name, [c](Context& context) { return time_fetch(context, c); }};
}
const CudaRegistration kFetches[] = {
    fetch_case("glm4", {kGlmBytes, 275, 1}),     fetch_case("v32", {kV32Bytes, 275, 1}),
    fetch_case("v32_run4", {kV32Bytes, 275, 4}), fetch_case("v4_85", {kV4Bytes, 85, 1}),
    fetch_case("v4_85_run4", {kV4Bytes, 85, 4}), fetch_case("v4_23", {kV4Bytes, 23, 1}),
    fetch_case("b1", {kOneRow, 113, 1}),
};

// --- resolve + fetch of one group, 113 misses a row ---

Measurement time_group(Context& context, DecodeShape shape) {
  constexpr std::int32_t kKept = 16;
  constexpr std::int32_t kRenewed = 121;
  constexpr double kMisses = 113;  // of those, since 1 unit in 15 is still cached
  DecodeState state(context.device(), shape);
  state.warm_up(renewal_traces(shape, kWarmSteps + kKept, kRenewed), kKept);
  const BenchStream stream;
  const double seconds = median_replay_seconds(
      stream,
      [&] {
        for (std::int32_t step = 0; step < kKept; ++step) {
          for (std::int32_t group = 0; group < shape.groups; ++group) {
            state.resolve(step, group, stream);
            state.fetch(step, group, stream);
          }
        }
      },
      [&] { state.restore(stream); });
  std::int64_t misses = 0;
  for (std::int32_t step = 0; step < kKept; ++step) {
    for (std::int32_t g = 0; g < shape.groups; ++g) misses += state.total_misses(step, g);
  }
  const double launches = static_cast<double>(kKept) * shape.groups;
  const double misses_per_row = static_cast<double>(misses) / launches / shape.b;
  if (std::abs(misses_per_row - kMisses) > 2) {
    throw std::runtime_error("the case is about " + std::to_string(kMisses) +
                             " misses per row and step, the trace gives " +
                             std::to_string(misses_per_row));
  }
  const double bytes = misses_per_row * shape.b * shape.members * shape.unit_bytes;
  return per_launch_us(seconds, launches, 2 * empty_launch_seconds() + bytes / link_copy_rate());
}

CudaRegistration group_case(const char* name, std::int32_t rows, std::int32_t members) {
  return {"group", name, [=](Context& context) {
            return time_group(context,
                              {.b = rows, .groups = 4, .members = members, .host_groups = 2});
          }};
}
const CudaRegistration kGroups[] = {
    group_case("one_b1", 1, 1),
    group_case("one_b32", 32, 1),
    group_case("one_b151", 151, 1),
    group_case("four_b151", 151, 4),
};

// --- flush: 151 rows, one unit each, 21 groups with 78 member layers ---

const CudaRegistration kFlush("flush", "glm", [](Context& context) {
  constexpr std::int32_t kRows = 151;
  // 19 groups of four members and two of one share two pools; each has a stretch of its own.
  constexpr std::int64_t kStretches = 10;
  DecodeState four(context.device(), {.b = kRows, .groups = 1, .members = 4, .host_groups = 2});
  DecodeState one(context.device(), {.b = kRows, .groups = 1, .members = 1, .host_groups = 2});
  std::vector<ops::GroupMemory> groups;
  for (std::int32_t g = 0; g < 21; ++g) {
    groups.push_back(g < 19 ? four.memory(g) : one.memory(g));
    ops::GroupMemory& group = groups.back();
    group.num_host_pages /= kStretches;
    group.host +=
        g / 2 % kStretches * group.num_host_pages * group.units_per_page * group.host_unit_bytes;
  }
  std::vector<ops::UnitMove> moves;
  for (std::int32_t row = 0; row < kRows; ++row) {
    constexpr std::int64_t kApart = 3271;  // host units between the rows' histories
    moves.push_back({row * kApart, row * (4096 + 64) + 4096});
  }
  const BenchStream stream;
  constexpr int kLaunches = 16;
  const double seconds = median_replay_seconds(
      stream,
      [&] {
        for (int i = 0; i < kLaunches; ++i) {
          ops::move_units(context.device(), {moves, groups, ops::MoveDirection::kArenaToHost},
                          stream.id());
        }
      },
      [] {});
  const double bytes = static_cast<double>(kRows) * 78 * 576;
  return per_launch_us(seconds, kLaunches, empty_launch_seconds() + bytes / link_copy_rate());
});

}  // namespace
}  // namespace sparse_kvcm::bench
