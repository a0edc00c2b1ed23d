// What the machine gives, measured in the same run as the benchmarks. Each at first use.
#pragma once

namespace sparse_kvcm::bench {

// cudaMemcpyAsync of 1 GiB from pinned memory, bytes per second.
[[nodiscard]] double link_copy_rate();
// A device to device copy of 4 GiB, bytes read plus bytes written per second.
[[nodiscard]] double device_copy_rate();
// An empty kernel as a node of a replayed graph, seconds.
[[nodiscard]] double empty_launch_seconds();

}  // namespace sparse_kvcm::bench
