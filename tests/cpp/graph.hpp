// Launches that are made once and replayed: a CUDA graph on a GPU. The CPU runs every launch at
// once and has no graphs: there a replay makes the same launches again, with the same addresses.
#pragma once

#include <functional>
#include <memory>

#include "sparse_kvcm/types.hpp"

namespace sparse_kvcm::testing {

class Graph {
 public:
  virtual ~Graph() = default;
  [[nodiscard]] virtual Stream stream() const = 0;  // of the captured launches; lives as long
  virtual void capture(std::function<void()> launches) = 0;
  virtual void replay() = 0;
};

[[nodiscard]] std::unique_ptr<Graph> make_graph(Device device);

// Defined in cuda/ or in no_cuda/; CMake links one of them.
[[nodiscard]] std::unique_ptr<Graph> make_cuda_graph(std::int32_t index);

}  // namespace sparse_kvcm::testing
