#include "cuda/trace.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <unordered_set>

namespace sparse_kvcm::bench {
namespace {

// A sum of four uniforms, scaled: close enough to normal for a score, and cheap.
class Noise {
 public:
  explicit Noise(std::uint64_t seed) : random_(seed) {}
  float operator()() {
    const std::uint64_t bits = random_();
    constexpr float kScale = 1.7320508f / 65536.0f;  // variance 1
    const float sum = static_cast<float>(bits & 0xFFFF) +
                      static_cast<float>((bits >> 16) & 0xFFFF) +
                      static_cast<float>((bits >> 32) & 0xFFFF) + static_cast<float>(bits >> 48);
    return (sum - 2.0f * 65535.0f) * kScale;
  }

 private:
  std::mt19937_64 random_;
};

std::vector<float> field(std::size_t units, Noise& noise) {
  std::vector<float> values(units);
  for (float& value : values) value = noise();
  return values;
}

std::vector<std::int32_t> top_k(const std::vector<float>& scores, std::int32_t k) {
  std::vector<std::int32_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  std::nth_element(order.begin(), order.begin() + k, order.end(), [&](auto a, auto b) {
    return scores[static_cast<std::size_t>(a)] > scores[static_cast<std::size_t>(b)];
  });
  order.resize(static_cast<std::size_t>(k));
  std::sort(order.begin(), order.end());
  return order;
}

}  // namespace

Trace drift_trace_glm51(const TraceShape& shape, std::uint64_t seed) {
  constexpr float kStatic = 0.70f;
  constexpr float kFresh = 0.03f;
  constexpr float kDrift = 1.0f - kStatic - kFresh;
  constexpr float kCorrelation = 0.90f;
  Noise noise(seed);
  const auto units = static_cast<std::size_t>(shape.units);
  const std::vector<float> fixed = field(units, noise);
  std::vector<float> drifting = field(units, noise);
  std::vector<float> scores(units);
  Trace trace;
  for (std::int32_t step = 0; step < shape.steps; ++step) {
    for (std::size_t u = 0; u < units; ++u) {
      drifting[u] =
          kCorrelation * drifting[u] + std::sqrt(1.0f - kCorrelation * kCorrelation) * noise();
      scores[u] = std::sqrt(kStatic) * fixed[u] + std::sqrt(kDrift) * drifting[u] +
                  std::sqrt(kFresh) * noise();
    }
    trace.push_back(top_k(scores, shape.k));
  }
  return trace;
}

Trace renewal_trace(const TraceShape& shape, std::int32_t renewed, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::unordered_set<std::int32_t> chosen;
  std::vector<std::int32_t> selection;
  const auto fill = [&] {
    while (static_cast<std::int32_t>(selection.size()) < shape.k) {
      const auto unit =
          static_cast<std::int32_t>(random() % static_cast<std::uint64_t>(shape.units));
      if (chosen.insert(unit).second) selection.push_back(unit);
    }
  };
  Trace trace;
  for (std::int32_t step = 0; step < shape.steps; ++step) {
    std::shuffle(selection.begin(), selection.end(), random);
    for (std::int32_t i = 0; i < renewed && !selection.empty(); ++i) {
      chosen.erase(selection.back());
      selection.pop_back();
    }
    fill();
    trace.push_back(selection);
    std::sort(trace.back().begin(), trace.back().end());
  }
  return trace;
}

}  // namespace sparse_kvcm::bench
