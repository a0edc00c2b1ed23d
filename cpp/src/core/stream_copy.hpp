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

// REQUIRES, of both: `bytes` is a multiple of the step, the target aligned to it. Call stream_fence
// before anyone else reads.
inline void stream_by_16(std::byte* target, const std::byte* source, std::int64_t bytes) {
#if defined(__SSE2__)
  for (std::int64_t i = 0; i < bytes; i += 16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(target + i),
                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i)));
  }
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
