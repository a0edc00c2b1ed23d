#include "manager/table_patch.hpp"

#include <algorithm>

namespace sparse_kvcm {
namespace {

constexpr std::int64_t kLongestRun = 1024;  // a warp writes a run

}  // namespace

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
