// Selection traces: which units a request selects from step to step.
//
// drift: a unit's score is a static part, a part that drifts (AR(1)), and fresh noise; the
// selection is the top k. The preset `glm51` has the locality published for GLM-5.1 on
// LongBench-v2: LRU misses of 30 / 13.4 / 6.7 % with caches of 1, 2 and 4 k units.
// renewal: each step replaces a fixed number of units by uniform ones. No locality beyond that.
#pragma once

#include <cstdint>
#include <thread>
#include <vector>

namespace sparse_kvcm::bench {

// Ordinals [steps][k], each step ascending.
using Trace = std::vector<std::vector<std::int32_t>>;

struct TraceShape {
  std::int32_t units = 0;
  std::int32_t k = 0;
  std::int32_t steps = 0;
};

[[nodiscard]] Trace drift_trace_glm51(const TraceShape& shape, std::uint64_t seed);
[[nodiscard]] Trace renewal_trace(const TraceShape& shape, std::int32_t renewed,
                                  std::uint64_t seed);

// `count` traces by make(seed), a thread each, seeds 0 .. count - 1.
template <class Make>
std::vector<Trace> make_traces(std::int32_t count, const Make& make) {
  std::vector<Trace> traces(static_cast<std::size_t>(count));
  {
    std::vector<std::jthread> threads;
    for (std::size_t i = 0; i < traces.size(); ++i) {
      threads.emplace_back([&traces, &make, i] { traces[i] = make(i); });
    }
  }
  return traces;
}

}  // namespace sparse_kvcm::bench
