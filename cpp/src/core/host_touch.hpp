// The first touch of host memory, which is what making it takes the time for, on several threads.
#pragma once

#include <cstddef>
#include <functional>
#include <span>

namespace sparse_kvcm {

struct MemoryPart {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
};

// Touches whole pages that nobody uses yet: by `advice`, MADV_POPULATE_WRITE, and on kernels that
// do not know it by memset. Returns 0 or errno.
inline constexpr int kPopulateWrite = 23;  // Linux 5.14; older headers lack the name
[[nodiscard]] int touch_pages(std::byte* data, std::size_t bytes, int advice = kPopulateWrite);

// The same; throws HostMemoryError in the name of `function` if the kernel cannot give it.
void touch_pages_or_throw(const char* function, std::byte* data, std::size_t bytes);

// Calls `touch` for pieces of at most 64 MiB of the parts, in ascending order, on one thread per
// core; on this one alone if all of it is no more than such a piece. As soon as a piece and all
// before it are touched, `touched`(bytes from the start) is called on this thread, once per piece,
// while the threads go on. Throws what either throws, when the threads have ended.
void touch_parts(std::span<const MemoryPart> parts,
                 const std::function<void(std::byte* data, std::size_t bytes)>& touch,
                 const std::function<void(std::size_t bytes)>& touched = {});

}  // namespace sparse_kvcm
