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

struct Machine {
  int processors = 0;
  int shared_bytes = 0;  // most that a block may have
};

Machine current_machine() {
  int device = 0;
  Machine machine;
  SPARSE_KVCM_CUDA_CHECK(cudaGetDevice(&device));
  SPARSE_KVCM_CUDA_CHECK(
      cudaDeviceGetAttribute(&machine.processors, cudaDevAttrMultiProcessorCount, device));
  SPARSE_KVCM_CUDA_CHECK(cudaDeviceGetAttribute(&machine.shared_bytes,
                                                cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  return machine;
}

// Empty if a block of this form does not fit.
std::optional<ResolvePlan> with_waves(const Machine& machine, std::int32_t b, std::int32_t k,
                                      std::int32_t threads, std::int32_t bitmap_units) {
  ResolvePlan plan{threads, bitmap_units, resolve_shared_bytes(k, bitmap_units), 0};
  if (plan.shared_bytes > machine.shared_bytes) return std::nullopt;
  const void* kernel = resolve_kernel_of(threads);
  int blocks = 0;
  SPARSE_KVCM_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                              machine.shared_bytes));
  SPARSE_KVCM_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
      &blocks, kernel, threads, static_cast<std::size_t>(plan.shared_bytes)));
  if (blocks == 0) return std::nullopt;
  const std::int64_t at_once = std::int64_t{blocks} * machine.processors;
  plan.waves = (b + at_once - 1) / at_once;
  return plan;
}

// The longest bitmap that costs no wave beyond those of the shortest.
std::optional<ResolvePlan> widest(const Machine& machine, const ops::ResolveParams& params,
                                  std::int32_t threads) {
  const std::int32_t b = params.launch.b;
  std::int32_t units = std::min(params.max_units, kSmallHistory);
  std::optional<ResolvePlan> best = with_waves(machine, b, params.k, threads, units);
  while (best && units < params.max_units) {
    units = units > params.max_units / 2 ? params.max_units : 2 * units;
    const auto longer = with_waves(machine, b, params.k, threads, units);
    if (!longer || longer->waves > best->waves) break;
    best = longer;
  }
  return best;
}

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
    const auto plan = widest(machine, params, threads);
    if (plan && (!best || plan->waves < best->waves)) best = plan;
  }
  if (!best) {
    fail_argument("resolve", "k ", params.k, " takes ", resolve_shared_bytes(params.k, 1),
                  " B of shared memory, more than this device's ", machine.shared_bytes);
  }
  return *best;
}

}  // namespace sparse_kvcm
