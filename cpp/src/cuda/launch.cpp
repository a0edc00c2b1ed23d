#include "cuda/launch.hpp"

#include <map>
#include <mutex>
#include <utility>

namespace sparse_kvcm {

bool can_overlap(const void* kernel) {
  constexpr int kHopper = 90;
  static std::mutex mutex;
  static std::map<std::pair<int, const void*>, bool> known;
  int device = 0;
  SPARSE_KVCM_CUDA_CHECK(cudaGetDevice(&device));
  const std::lock_guard lock(mutex);
  const auto found = known.find({device, kernel});
  if (found != known.end()) return found->second;
  cudaFuncAttributes attributes{};
  SPARSE_KVCM_CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel));
  return known[{device, kernel}] = attributes.ptxVersion >= kHopper;
}

}  // namespace sparse_kvcm
