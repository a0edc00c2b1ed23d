#include <algorithm>
#include <cstddef>

#include "cpu/cpu_backend.hpp"

namespace sparse_kvcm {

void CpuBackend::reset_leases(const ops::ResetParams& params, Stream) {
  for (std::size_t group = 0; group < params.entries.size(); ++group) {
    for (const ops::LeaseReset& lease : params.leases) {
      if (lease.cached_slots > 0) {
        std::fill_n(params.entries[group] + lease.base, lease.cached_slots, kEmptyEntry);
      }
      params.last[group][lease.lease_id] = params.clock;
    }
  }
}

}  // namespace sparse_kvcm
