// One block per lease and group. Leases and groups travel as kernel parameters, as many as fit.
#include <algorithm>
#include <cstddef>

#include "cuda/error.hpp"
#include "cuda/kernels.hpp"

namespace sparse_kvcm {
namespace {

constexpr int kThreads = 256;
constexpr std::size_t kLeasesAtOnce = 512;
constexpr std::size_t kGroupsAtOnce = 128;

struct ResetLaunch {
  std::uint32_t clock = 0;
  ops::LeaseReset leases[kLeasesAtOnce];
  Entry* entries[kGroupsAtOnce];
  std::uint32_t* last[kGroupsAtOnce];
};

static_assert(sizeof(ResetLaunch) <= 32'764, "kernel parameters, CUDA 12.1 and later");

__global__ void __launch_bounds__(kThreads)
    reset_leases_kernel(const __grid_constant__ ResetLaunch p) {
  const ops::LeaseReset& lease = p.leases[blockIdx.x];
  Entry* entries = p.entries[blockIdx.y] + lease.base;
  for (int n = threadIdx.x; n < lease.cached_slots; n += kThreads) entries[n] = kEmptyEntry;
  if (threadIdx.x == 0) p.last[blockIdx.y][lease.lease_id] = p.clock;
}

}  // namespace

void launch_reset_leases(const ops::ResetParams& params, cudaStream_t stream) {
  ResetLaunch p;
  p.clock = params.clock;
  for (std::size_t group = 0; group < params.entries.size(); group += kGroupsAtOnce) {
    const std::size_t groups = std::min(kGroupsAtOnce, params.entries.size() - group);
    std::copy_n(params.entries.begin() + static_cast<std::ptrdiff_t>(group), groups, p.entries);
    std::copy_n(params.last.begin() + static_cast<std::ptrdiff_t>(group), groups, p.last);
    for (std::size_t lease = 0; lease < params.leases.size(); lease += kLeasesAtOnce) {
      const std::size_t leases = std::min(kLeasesAtOnce, params.leases.size() - lease);
      std::copy_n(params.leases.begin() + static_cast<std::ptrdiff_t>(lease), leases, p.leases);
      const dim3 grid(static_cast<unsigned>(leases), static_cast<unsigned>(groups));
      reset_leases_kernel<<<grid, kThreads, 0, stream>>>(p);
      SPARSE_KVCM_CUDA_CHECK(cudaGetLastError());
    }
  }
}

}  // namespace sparse_kvcm
