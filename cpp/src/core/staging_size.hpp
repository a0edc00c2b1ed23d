// The pinned memory that an upload is staged in, which planning counts and the CUDA backend takes.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>

namespace sparse_kvcm {

// Powers of two, so that a chunk can be used again for uploads of other sizes.
constexpr std::size_t staging_chunk_bytes(std::size_t upload_bytes) {
  constexpr std::size_t kSmallest = std::size_t{64} * 1024;
  return std::bit_ceil(std::max(upload_bytes, kSmallest));
}

}  // namespace sparse_kvcm
