// Keeps chunks of memory to be used again. What nobody has needed for long goes: a burst leaves
// nothing behind, and a steady load never makes a chunk anew.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace sparse_kvcm {

// A Chunk has bytes() and is_idle(): what was done with it is over. Thread-compatible.
template <class Chunk>
class ChunkPool {
 public:
  using Ptr = std::unique_ptr<Chunk>;

  // The smallest idle chunk that has `bytes`, of equal ones that which was used last, or null. So
  // few are in use, and the others age.
  [[nodiscard]] Ptr take(std::size_t bytes) {
    ++now_;
    auto best = kept_.end();
    for (auto it = kept_.begin(); it != kept_.end(); ++it) {
      if (it->chunk->bytes() < bytes || (best != kept_.end() && !is_better(*it, *best))) continue;
      if (it->chunk->is_idle()) best = it;
    }
    return best == kept_.end() ? nullptr : remove(best);
  }
  void put(Ptr chunk) { kept_.push_back({std::move(chunk), now_}); }

  // Idle chunks that the last kPatience calls of take had no need of.
  static constexpr std::int64_t kPatience = 1024;
  [[nodiscard]] std::vector<Ptr> take_surplus() {
    std::vector<Ptr> surplus;
    for (std::size_t i = kept_.size(); i-- > 0;) {
      if (now_ - kept_[i].last_use <= kPatience || !kept_[i].chunk->is_idle()) continue;
      surplus.push_back(remove(kept_.begin() + static_cast<std::ptrdiff_t>(i)));
    }
    return surplus;
  }

 private:
  struct Kept {
    Ptr chunk;
    std::int64_t last_use = 0;
  };
  static bool is_better(const Kept& a, const Kept& b) {
    return std::pair(a.chunk->bytes(), -a.last_use) < std::pair(b.chunk->bytes(), -b.last_use);
  }
  Ptr remove(std::vector<Kept>::iterator it) {
    Ptr chunk = std::move(it->chunk);
    kept_.erase(it);
    return chunk;
  }

  std::vector<Kept> kept_;
  std::int64_t now_ = 0;  // calls of take
};

}  // namespace sparse_kvcm
