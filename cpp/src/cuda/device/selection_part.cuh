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
      ahead_[u] = has(u) ? mine_[u * kThreads] : -1;
    }
  }
  // Whether the selection has the thread's unit `u`.
  [[nodiscard]] __device__ bool has(int u) const { return position(u) < k_; }
  // The thread's unit `u` < kAhead; selects among registers.
  [[nodiscard]] __device__ std::int32_t ahead(int u) const {
    std::int32_t ordinal = ahead_[0];
#pragma unroll
    for (int other = 1; other < kAhead; ++other) ordinal = u == other ? ahead_[other] : ordinal;
    return ordinal;
  }
  // Calls use(u, position, ordinal) for all units ahead, with u known to the compiler. Those that
  // the selection does not have are -1, as unused ones.
  template <class Use>
  __device__ void for_each_ahead(const Use& use) const {
#pragma unroll
    for (int u = 0; u < kAhead; ++u) use(u, position(u), ahead_[u]);
  }
  // The same for the others, as far as the selection goes.
  template <class Use>
  __device__ void for_each_later(const Use& use) const {
#pragma unroll 1
    for (int u = kAhead; has(u); ++u) {
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
