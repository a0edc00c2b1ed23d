// Anonymous host memory of exactly the asked size, for pools of many GiB.
//
// Transparent huge pages are asked for unless the environment says SPARSE_KVCM_THP=0. The first
// touch, which is what takes the time, runs on several threads. What the machine or its control
// group cannot hold is refused before that.
//
// Owns the mapping. Thread-compatible.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "core/host_advice.hpp"
#include "sparse_kvcm/config.hpp"

namespace sparse_kvcm {

class HostMapping {
 public:
  // Maps, and touches nothing; aligned to a huge page where it is as large as one. `numa_node` is
  // preferred, not demanded. bytes == 0 maps nothing. Throws HostMemoryError.
  explicit HostMapping(std::size_t bytes, int numa_node = kAnyNode);
  ~HostMapping();
  HostMapping(const HostMapping&) = delete;
  HostMapping& operator=(const HostMapping&) = delete;

  // Touches all of it; from then on it is there, and zero until written. At each call of `progress`
  // the first bytes_done bytes have been touched, and the threads go on with those behind.
  // Throws HostMemoryError, or what `progress` throws, when the threads have ended.
  void fill(const FillProgress& progress);

  // Children of a fork get nothing of it, and leave it alone. For pinned memory: a child's copy
  // would take the whole size again, at once.
  void keep_from_children();

  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }
  // What did not go as wished so far, a sentence each.
  [[nodiscard]] const std::vector<std::string>& warnings() const { return warnings_; }

 private:
  std::size_t bytes_;
  std::vector<std::string> warnings_;
  HostAdvice advice_;
  std::byte* data_ = nullptr;
  int owner_ = 0;  // the process that has it, if it is kept from children
};

}  // namespace sparse_kvcm
