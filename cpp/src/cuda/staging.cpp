#include "cuda/staging.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/staging_size.hpp"
#include "cuda/error.hpp"

namespace sparse_kvcm {

// A chunk that is large enough and no longer read, or a new one.
std::unique_ptr<Staging::Chunk> Staging::take(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto found = std::find_if(chunks_.begin(), chunks_.end(), [&](const auto& chunk) {
    return chunk->memory.bytes() >= bytes && chunk->copied.done();
  });
  if (found == chunks_.end()) {
    return std::make_unique<Chunk>(staging_chunk_bytes(bytes));
  }
  std::unique_ptr<Chunk> chunk = std::move(*found);
  chunks_.erase(found);
  return chunk;
}

void Staging::upload(std::span<const Upload> uploads, cudaStream_t stream) {
  std::size_t total = 0;
  for (const Upload& upload : uploads) total += upload.bytes;
  if (total == 0) return;
  run(
      total,
      [&](std::byte* staged, const std::byte*) {
        for (const Upload& upload : uploads) {
          if (upload.bytes == 0) continue;
          std::memcpy(staged, upload.source, upload.bytes);
          SPARSE_KVCM_CUDA_CHECK(cudaMemcpyAsync(upload.destination, staged, upload.bytes,
                                                 cudaMemcpyHostToDevice, stream));
          staged += upload.bytes;
        }
      },
      stream);
}

void Staging::run(std::size_t bytes, const Work& work, cudaStream_t stream) {
  std::unique_ptr<Chunk> chunk = take(bytes);
  work(chunk->memory.data(), chunk->memory.device_data());
  chunk->copied.record(stream);
  const std::lock_guard lock(mutex_);
  chunks_.push_back(std::move(chunk));
}

}  // namespace sparse_kvcm
