#include "storage/prefill_slots.hpp"

#include <algorithm>
#include <set>
#include <utility>

namespace sparse_kvcm {
namespace {

// Lengths come to an edge up to a page, a token and a step before or behind it.
constexpr std::int64_t kAround = 3;

}  // namespace

PrefillSlots::PrefillSlots(Count count, std::int64_t page, std::int64_t step,
                           const std::vector<std::int64_t>& edges, std::int32_t upper)
    : count_(std::move(count)), page_(page), step_(step) {
  std::set<std::int64_t> steps{0};
  for (const std::int64_t edge : edges) {
    for (std::int64_t near = edge / step - kAround; near <= edge / step + kAround; ++near) {
      if (near > 0 && near < upper / step) steps.insert(near);
    }
  }
  if (upper < step) steps.clear();
  std::int64_t most = 0;
  for (const std::int64_t s : steps) {
    most = std::max(most, at_end(s));
    samples_.push_back({s, most});
  }
}

std::int64_t PrefillSlots::at_end(std::int64_t step) const {
  return count_(static_cast<std::int32_t>((step + 1) * step_ - page_ + 1),
                static_cast<std::int32_t>(step * step_));
}

// A length counts as the first token of its last page.
std::int64_t PrefillSlots::most(std::int32_t length) const {
  const std::int64_t last = (length - 1) / page_ * page_ + 1;
  const std::int64_t step = (last - 1) / step_;
  std::int64_t slots =
      count_(static_cast<std::int32_t>(last), static_cast<std::int32_t>(step * step_));
  if (step > 0) slots = std::max(slots, at_end(step - 1));
  const auto behind = std::ranges::lower_bound(samples_, step, {}, &Sample::step);
  return behind == samples_.begin() ? slots : std::max(slots, std::prev(behind)->slots);
}

}  // namespace sparse_kvcm
