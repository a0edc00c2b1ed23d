// How a resolve is launched: how many threads a row gets, and how much shared memory its index.
//
// More threads make one row faster, fewer let more rows run at once. So the plan asks the driver
// how many blocks of each width fit a multiprocessor with the shared memory that they will use, and
// takes the width that needs fewer waves, the wider one on a tie. Direct table and bitmap cover as
// long a history as costs no wave.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <tuple>

#include "sparse_kvcm/ops.hpp"

namespace sparse_kvcm {

struct ResolvePlan {
  std::int32_t threads = 0;        // 256 or 512
  std::int32_t direct_units = 0;   // longest cached history that the direct table covers
  std::int32_t bitmap_units = 0;   // longest that the bitmap covers
  std::uint32_t shared_bytes = 0;  // dynamic shared memory of a block
  std::int64_t waves = 0;
};

// Makes plans for one device and remembers them. Thread-safe.
class ResolvePlanner {
 public:
  // REQUIRES: the planner's device is current.
  // Throws InvalidArgument if `k` is larger than this device's shared memory allows: what a block
  // can have is known to nobody above.
  ResolvePlan plan(const ops::ResolveParams& params);

 private:
  using Key = std::tuple<std::int32_t, std::int32_t, std::int32_t, std::int32_t>;
  ResolvePlan make(const ops::ResolveParams& params) const;

  std::mutex mutex_;
  std::map<Key, ResolvePlan> plans_;
};

// Shared memory of a block of `threads`, in bytes. Grows with each of the others.
[[nodiscard]] std::uint32_t resolve_shared_bytes(std::int32_t threads, std::int32_t k,
                                                 std::int32_t direct_units,
                                                 std::int32_t bitmap_units);
// The kernel that has `threads` threads.
[[nodiscard]] const void* resolve_kernel_of(std::int32_t threads);

}  // namespace sparse_kvcm
