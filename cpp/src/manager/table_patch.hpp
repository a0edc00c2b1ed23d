// Collects what has to change in a Batch's device memory, as runs of words, and sends all of it in
// one piece. Its memory is kept from publish to publish.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "backend/backend.hpp"

namespace sparse_kvcm {

class TablePatch {
 public:
  // `base` is word 0 of the memory.
  explicit TablePatch(std::int32_t* base) : base_(base) {}

  // What a backend stages for every row with all its tables, [layer_groups][rows][pages], and
  // counts.
  [[nodiscard]] static std::int64_t most_bytes(std::int64_t rows, std::int64_t layer_groups,
                                               std::int64_t pages);

  void clear();
  [[nodiscard]] bool empty() const { return runs_.empty(); }
  // Writes `words` at `place`. Joins with the run before where both places and words follow on.
  void write(const std::int32_t* place, std::span<const std::int32_t> words);
  void write(const std::int32_t* place, std::int32_t word) { write(place, {&word, 1}); }
  // Writes -1 into the `count` words at `place`.
  void erase(const std::int32_t* place, std::int64_t count);
  void send(Backend& backend, Stream stream) const;

 private:
  std::int32_t* base_;
  std::vector<PatchRun> runs_;
  std::vector<std::int32_t> words_;
};

}  // namespace sparse_kvcm
