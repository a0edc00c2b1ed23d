#include "graph.hpp"

#include "sparse_kvcm/device.hpp"
#include "sparse_kvcm/error.hpp"

namespace sparse_kvcm::testing {

std::unique_ptr<Graph> make_cuda_graph(std::int32_t) {
  throw NotAvailable("[make_cuda_graph] " + cuda_unavailable_reason());
}

}  // namespace sparse_kvcm::testing
