// The cases of the program, in no particular order.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "bench.hpp"

namespace sparse_kvcm::bench {

struct Case {
  std::string bench;
  std::string name;
  Function run;
};

std::vector<Case>& registry();

// A sweep over the points of a tuning table. It prints one JSON object per point and line, which
// scripts/tune_fetch.py turns into the table. Empty where this build has no CUDA.
std::function<void(Context&)>& fetch_sweep();

struct SweepRegistration {
  explicit SweepRegistration(std::function<void(Context&)> run) { fetch_sweep() = std::move(run); }
};

}  // namespace sparse_kvcm::bench
