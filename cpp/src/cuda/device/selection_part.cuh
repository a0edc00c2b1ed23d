// A thread's part of a row's selection: units threadIdx.x, threadIdx.x + kThreads and so on. The
// first kAhead stay in registers, read before the row is known: as many as usual selections have.
#pragma once

#include <cstdint>

namespace sparse_kvcm::device {

template <int kThreads>
class SelectionPart {
 public:
  static constexpr int kAhead = kThreads / 128;

  // `selection` is the row's, of `k` units.
  __device__ SelectionPart(const std::int32_t* selection, std::int32_t k)
      : mine_(selection + threadIdx.x), k_(k) {
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      ahead_[u] = position(u) < k ? mine_[u * kThreads] : -1;
    }
  }
  // Calls use(u, position, ordinal) for the units ahead, with u known to the compiler.
  template <class Use>
  __device__ void for_each_ahead(const Use& use) const {
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      if (position(u) < k_) use(u, position(u), ahead_[u]);
    }
  }
  // The same for the others.
  template <class Use>
  __device__ void for_each_later(const Use& use) const {
#pragma unroll 1
    for (int u = kAhead; position(u) < k_; ++u) {
      use(u, position(u), mine_[u * kThreads]);
    }
  }

 private:
  [[nodiscard]] __device__ static int position(int u) {
    return static_cast<int>(threadIdx.x) + u * kThreads;
  }

  const std::int32_t* mine_;
  std::int32_t k_;
  std::int32_t ahead_[kAhead];
};

}  // namespace sparse_kvcm::device
