// Linked instead of cuda/ where there is no nvcc: the same symbols, which answer "not available".
#include <memory>
#include <string>

#include "backend/backend.hpp"
#include "core/check.hpp"
#include "sparse_kvcm/device.hpp"

namespace sparse_kvcm {

bool cuda_is_available() noexcept { return false; }

std::string cuda_unavailable_reason() {
  return "this build has no CUDA backend: SPARSE_KVCM_CUDA was OFF, or there was no nvcc";
}

std::shared_ptr<Backend> make_cuda_backend(std::int32_t index) {
  throw NotAvailable(message("backend_for", "there is no device \"cuda:", index,
                             "\": ", cuda_unavailable_reason()));
}

}  // namespace sparse_kvcm
