#include "cuda/staging.hpp"

#include <cstring>
#include <utility>
#include <vector>

#include "core/staging_size.hpp"
#include "cuda/error.hpp"

namespace sparse_kvcm {

// A chunk that is large enough and no longer read, or a new one. Chunks come and go beside captures
// of other threads.
std::unique_ptr<Staging::Chunk> Staging::take(std::size_t bytes) {
  std::unique_ptr<Chunk> chunk;
  std::vector<std::unique_ptr<Chunk>> surplus;
  {
    const std::lock_guard lock(mutex_);
    chunk = chunks_.take(bytes);
    surplus = chunks_.take_surplus();
  }
  if (chunk && surplus.empty()) return chunk;
  const RelaxedCapture relaxed;
  for (const auto& unused : surplus) unused->memory.set_unused();
  surplus.clear();
  return chunk ? std::move(chunk) : std::make_unique<Chunk>(staging_chunk_bytes(bytes));
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
  chunks_.put(std::move(chunk));
}

}  // namespace sparse_kvcm
