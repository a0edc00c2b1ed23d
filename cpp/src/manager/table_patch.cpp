#include "manager/table_patch.hpp"

#include <algorithm>

namespace sparse_kvcm {
namespace {

constexpr std::int64_t kLongestRun = 1024;  // a warp writes a run

}  // namespace

// A table is some words and -1 behind them, so that each of the two may end in a shorter run.
std::int64_t TablePatch::most_bytes(std::int64_t rows, std::int64_t layer_groups,
                                    std::int64_t pages) {
  constexpr std::int64_t kRun = sizeof(PatchRun);
  constexpr std::int64_t kWord = sizeof(std::int32_t);
  const std::int64_t table = (pages + 1) * kWord + (pages / kLongestRun + 3) * kRun;
  return rows * (static_cast<std::int64_t>(sizeof(RowState)) + kRun + layer_groups * table);
}

void TablePatch::clear() {
  runs_.clear();
  words_.clear();
}

void TablePatch::write(const std::int32_t* place, std::span<const std::int32_t> words) {
  std::int64_t offset = place - base_;
  while (!words.empty()) {
    const auto source = static_cast<std::int32_t>(words_.size());
    PatchRun* last = runs_.empty() ? nullptr : &runs_.back();
    const bool joins = last != nullptr && last->source != PatchRun::kMinusOne &&
                       last->offset + last->count == offset && last->count < kLongestRun;
    if (!joins) last = &runs_.emplace_back(PatchRun{offset, 0, source});
    const auto count = static_cast<std::int32_t>(
        std::min(static_cast<std::int64_t>(words.size()), kLongestRun - last->count));
    words_.insert(words_.end(), words.begin(), words.begin() + count);
    last->count += count;
    offset += count;
    words = words.subspan(static_cast<std::size_t>(count));
  }
}

void TablePatch::erase(const std::int32_t* place, std::int64_t count) {
  const std::int64_t offset = place - base_;
  for (std::int64_t done = 0; done < count; done += kLongestRun) {
    runs_.push_back({offset + done, static_cast<std::int32_t>(std::min(count - done, kLongestRun)),
                     PatchRun::kMinusOne});
  }
}

void TablePatch::send(Backend& backend, Stream stream) const {
  if (!runs_.empty()) backend.patch(base_, runs_, words_, stream);
}

}  // namespace sparse_kvcm
