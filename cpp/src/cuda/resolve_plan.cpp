#include "cuda/resolve_plan.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <optional>

#include "core/check.hpp"
#include "cuda/error.hpp"

namespace sparse_kvcm {
namespace {

// Histories up to this length always get a bitmap: it takes less memory than the rest of a block.
constexpr std::int32_t kSmallHistory = 32'768;
// Longer direct tables take longer to clear than the first loads take to arrive.
constexpr std::int32_t kMaxDirect = 32'768;

struct Machine {
  int processors = 0;
  std::uint32_t shared_bytes = 0;  // most that a block may have
};

Machine current_machine() {
  int device = 0;
  Machine machine;
  SPARSE_KVCM_CUDA_CHECK(cudaGetDevice(&device));
  SPARSE_KVCM_CUDA_CHECK(
      cudaDeviceGetAttribute(&machine.processors, cudaDevAttrMultiProcessorCount, device));
  int shared_bytes = 0;
  SPARSE_KVCM_CUDA_CHECK(
      cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  machine.shared_bytes = static_cast<std::uint32_t>(shared_bytes);
  return machine;
}

// Asks how the launch would go with plans of one width.
class Trial {
 public:
  Trial(const Machine& machine, const ops::ResolveParams& params, std::int32_t threads)
      : machine_(machine), params_(params), threads_(threads) {}

  // Empty if a block does not fit.
  [[nodiscard]] std::optional<ResolvePlan> with(std::int32_t direct_units,
                                                std::int32_t bitmap_units) const {
    const std::uint32_t bytes =
        resolve_shared_bytes(threads_, params_.k, direct_units, bitmap_units);
    if (bytes > machine_.shared_bytes) return std::nullopt;
    ResolvePlan plan{threads_, direct_units, bitmap_units, bytes, 0};
    const void* kernel = resolve_kernel_of(threads_);
    int blocks = 0;
    SPARSE_KVCM_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                static_cast<int>(machine_.shared_bytes)));
    SPARSE_KVCM_CUDA_CHECK(
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads_, bytes));
    if (blocks == 0) return std::nullopt;
    const std::int64_t at_once = std::int64_t{blocks} * machine_.processors;
    plan.waves = (params_.launch.b + at_once - 1) / at_once;
    return plan;
  }

  // The longest direct table and bitmap that cost no wave beyond those of a short bitmap.
  [[nodiscard]] std::optional<ResolvePlan> widest() const {
    const std::int32_t max_units = params_.max_units;
    std::int32_t bitmap = std::min(max_units, kSmallHistory);
    std::optional<ResolvePlan> best = with(0, bitmap);
    const auto take = [&](std::int32_t direct_units, std::int32_t bitmap_units) {
      const auto longer = with(direct_units, bitmap_units);
      const bool is_free = longer && longer->waves <= best->waves;
      if (is_free) best = longer;
      return is_free;
    };
    if (!best) return best;
    take(std::min(max_units, kMaxDirect), bitmap);
    while (bitmap < max_units) {
      bitmap = bitmap > max_units / 2 ? max_units : 2 * bitmap;
      if (!take(best->direct_units, bitmap)) break;
    }
    return best;
  }

 private:
  const Machine& machine_;
  const ops::ResolveParams& params_;
  std::int32_t threads_;
};

}  // namespace

ResolvePlan ResolvePlanner::plan(const ops::ResolveParams& params) {
  const Key key{params.launch.b, params.k, params.max_units, params.threads};
  const std::lock_guard lock(mutex_);
  const auto found = plans_.find(key);
  if (found != plans_.end()) return found->second;
  return plans_.emplace(key, make(params)).first->second;
}

ResolvePlan ResolvePlanner::make(const ops::ResolveParams& params) const {
  const Machine machine = current_machine();
  std::optional<ResolvePlan> best;
  for (const std::int32_t threads : {512, 256}) {
    if (params.threads != 0 && params.threads != threads) continue;
    const auto plan = Trial(machine, params, threads).widest();
    if (plan && (!best || plan->waves < best->waves)) best = plan;
  }
  if (!best) {
    fail_argument("resolve", "k ", params.k, " takes ", resolve_shared_bytes(256, params.k, 0, 1),
                  " B of shared memory, more than this device's ", machine.shared_bytes);
  }
  return *best;
}

}  // namespace sparse_kvcm
