// Copies to memory that is not read again soon, past the caches: without streaming stores every
// line of the target would be read before it is written. Whole lines in the order of addresses, or
// it is slow.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace sparse_kvcm {

inline constexpr std::int64_t kLine = 64;
// What is read next mostly follows what is read now. Hardware prefetchers stop at each 4 KB, which
// costs a source of one stream a fifth of its rate (`scripts/bench repack`, v4).
inline constexpr std::int64_t kAhead = 2048;

// REQUIRES, of both: `bytes` is a multiple of the step, the target aligned to it. Call stream_fence
// before anyone else reads.
inline void stream_by_16(std::byte* target, const std::byte* source, std::int64_t bytes) {
#if defined(__SSE2__)
  const auto step = [&](std::int64_t i) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(target + i),
                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i)));
  };
  std::int64_t i = 0;
  for (; i + kLine <= bytes; i += kLine) {
    __builtin_prefetch(source + i + kAhead);
    step(i);
    step(i + 16);
    step(i + 32);
    step(i + 48);
  }
  for (; i < bytes; i += 16) step(i);
#else
  std::memcpy(target, source, static_cast<std::size_t>(bytes));
#endif
}

inline void stream_by_4(std::byte* target, const std::byte* source, std::int64_t bytes) {
#if defined(__SSE2__)
  for (std::int64_t i = 0; i < bytes; i += 4) {
    std::int32_t word = 0;
    std::memcpy(&word, source + i, sizeof(word));
    _mm_stream_si32(reinterpret_cast<int*>(target + i), word);
  }
#else
  std::memcpy(target, source, static_cast<std::size_t>(bytes));
#endif
}

// Orders streaming stores before whatever this thread does next.
inline void stream_fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace sparse_kvcm
