// What host memory for pools is told and asked besides its size: huge pages, the NUMA node, that
// children of a fork get none of it. None of it is an error where it cannot be had.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <string>

#include "core/numa.hpp"

namespace sparse_kvcm {

inline constexpr std::size_t kHugePage = std::size_t{2} << 20;

// Told what did not go as wished, a sentence at a time.
using Warn = std::function<void(const std::string&)>;

// Thread-safe, as `warn` is.
class HostAdvice {
 public:
  // Reads SPARSE_KVCM_THP: 0 does without huge pages. `node` is preferred, not demanded.
  HostAdvice(const char* function, int node, Warn warn);

  // Before the first touch. Whole huge pages of the range become such; the rest small ones, so that
  // a small pool takes little.
  void apply(std::byte* data, std::size_t bytes);
  // After it: warns of pages that are elsewhere.
  void verify(std::byte* data, std::size_t bytes) const;

 private:
  const char* function_;
  int node_;
  std::atomic<int> node_error_ =
      0;  // of the preference, which only matters if the pages are elsewhere
  bool huge_pages_ = true;
  Warn warn_;
};

// Children of a fork get nothing of the range; before it is registered. A child's copy of pinned
// memory would take the whole size again, at once.
void keep_from_children(std::byte* data, std::size_t bytes) noexcept;

}  // namespace sparse_kvcm
