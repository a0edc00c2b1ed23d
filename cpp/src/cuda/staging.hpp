// Pinned staging for what the host sends: the caller's memory may be anything and may change when
// upload returns, so its bytes go through chunks of ours. A chunk is written again only after the
// event behind its last copy. Nothing waits: if every chunk is in flight, there is one more.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <span>

#include "core/chunk_pool.hpp"
#include "cuda/handles.hpp"
#include "cuda/pinned_buffer.hpp"

namespace sparse_kvcm {

// Thread-safe. Belongs to one device, which must be current in every call.
class Staging {
 public:
  void upload(std::span<const Upload> uploads, cudaStream_t stream);
  // Lets `work` write `bytes` of a chunk, whose address on the device it gets too, and enqueue on
  // `stream` what reads them.
  using Work = std::function<void(std::byte* staged, const std::byte* mapped)>;
  void run(std::size_t bytes, const Work& work, cudaStream_t stream);

 private:
  struct Chunk {
    explicit Chunk(std::size_t bytes) : memory(bytes) {}
    [[nodiscard]] std::size_t bytes() const { return memory.bytes(); }
    [[nodiscard]] bool is_idle() const { return copied.done(); }
    PinnedBuffer memory;
    CudaEvent copied;
  };

  std::unique_ptr<Chunk> take(std::size_t bytes);

  std::mutex mutex_;
  ChunkPool<Chunk> chunks_;
};

}  // namespace sparse_kvcm
