// The cases of the program, in no particular order.
#pragma once

#include <string>
#include <vector>

#include "bench.hpp"

namespace sparse_kvcm::bench {

struct Case {
  std::string bench;
  std::string name;
  Function run;
};

std::vector<Case>& registry();

}  // namespace sparse_kvcm::bench
