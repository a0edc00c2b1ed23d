#include "storage/page_allocator.hpp"

#include <algorithm>
#include <iterator>
#include <numeric>

namespace sparse_kvcm {

PageAllocator::PageAllocator(std::int32_t num_pages)
    : num_free_(num_pages), target_(num_pages), known_(num_pages) {
  if (num_pages > 0) runs_.emplace(0, Run{num_pages, false});
}

void PageAllocator::set_target(std::int32_t num_pages) {
  target_ = num_pages;
  // Free runs that now reach beyond.
  for (auto run = runs_.end(); run != runs_.begin();) {
    --run;
    const std::int32_t end = run->first + run->second.size;
    if (end <= target_) break;
    const std::int32_t first = std::max(run->first, target_);
    num_free_ -= end - first;
    insert_drained(first, end - first);
    run->second.size -= end - first;
    if (run->second.size == 0) run = runs_.erase(run);
  }
  // Drained ones that no longer do.
  while (!drained_.empty() && drained_.begin()->first < target_) {
    const auto [first, size] = *drained_.begin();
    drained_.erase(drained_.begin());
    insert_free(first, size);
  }
  if (target_ > known_) {
    insert_free(known_, target_ - known_);
    known_ = target_;
  }
}

std::int32_t PageAllocator::num_draining() const {
  std::int32_t drained = 0;
  for (const auto& [first, size] : drained_) drained += size;
  return known_ - target_ - drained;
}

std::int32_t PageAllocator::extent() const {
  if (drained_.empty()) return known_;
  const auto& [first, size] = *drained_.rbegin();
  return first + size == known_ ? first : known_;
}

bool PageAllocator::grow(std::vector<std::int32_t>& pages, std::int32_t count,
                         std::int32_t expected) {
  auto missing = [&] { return count - static_cast<std::int32_t>(pages.size()); };
  while (missing() > 0 && num_free_ > 0) {
    if (take_behind(pages, missing()) == 0) {
      const auto have = static_cast<std::int32_t>(pages.size());
      take_fresh(pages, missing(), std::max(expected - have, missing()));
    }
  }
  return missing() <= 0;
}

void PageAllocator::share(std::span<const std::int32_t> pages) {
  for (const std::int32_t page : pages) ++more_owners_[page];
}

// Takes one owner of the page away, if there is another.
bool PageAllocator::has_other_owner(std::int32_t page) {
  const auto found = more_owners_.find(page);
  if (found == more_owners_.end()) return false;
  if (--found->second == 0) more_owners_.erase(found);
  return true;
}

void PageAllocator::shrink(std::vector<std::int32_t>& pages, std::int32_t count) {
  if (static_cast<std::int32_t>(pages.size()) <= count) return;
  unclaim(pages.back() + 1);
  const auto kept = pages.begin() + count;
  if (!more_owners_.empty()) {
    pages.erase(std::remove_if(kept, pages.end(),
                               [this](std::int32_t page) { return has_other_owner(page); }),
                pages.end());
  }
  for (auto first = kept; first != pages.end();) {
    auto last = std::next(first);
    while (last != pages.end() && *last == *std::prev(last) + 1) ++last;
    insert_free(*first, static_cast<std::int32_t>(last - first));
    first = last;
  }
  pages.erase(kept, pages.end());
}

// The run right behind the request's last page, claimed or not.
std::int32_t PageAllocator::take_behind(std::vector<std::int32_t>& pages, std::int32_t count) {
  if (pages.empty()) return 0;
  const auto run = runs_.find(pages.back() + 1);
  if (run == runs_.end()) return 0;
  const std::int32_t taken = std::min(count, run->second.size);
  take_front(run, taken, pages);
  return taken;
}

// The beginning of a new stretch; what `expected` leaves of it stays claimed. With nothing but
// claimed runs left, the far half of the longest one, so that its owner can still grow.
std::int32_t PageAllocator::take_fresh(std::vector<std::int32_t>& pages, std::int32_t count,
                                       std::int32_t expected) {
  if (!pages.empty()) unclaim(pages.back() + 1);
  auto run = find_fresh(expected);
  if (run == runs_.end()) {
    run = longest_claimed();
    const std::int32_t near_half = run->second.size / 2;
    if (near_half > 0) {
      const Run far_half{run->second.size - near_half, true};
      run->second.size = near_half;
      run = runs_.emplace(run->first + near_half, far_half).first;
    }
  }
  const std::int32_t taken = std::min(count, run->second.size);
  const std::int32_t claim = std::min(expected, run->second.size) - taken;
  take_front(run, taken, pages);
  if (claim <= 0) return taken;
  const auto rest = runs_.find(pages.back() + 1);
  if (rest == runs_.end()) return taken;
  const Run beyond{rest->second.size - claim, rest->second.claimed};
  rest->second = {claim, true};
  if (beyond.size > 0) runs_.emplace(rest->first + claim, beyond);
  return taken;
}

// The smallest unclaimed run that holds `expected` pages, else the longest unclaimed one.
PageAllocator::Runs::iterator PageAllocator::find_fresh(std::int32_t expected) {
  auto best = runs_.end();
  for (auto run = runs_.begin(); run != runs_.end(); ++run) {
    if (run->second.claimed) continue;
    if (best == runs_.end()) {
      best = run;
      continue;
    }
    const bool fits = run->second.size >= expected;
    const bool best_fits = best->second.size >= expected;
    const bool smaller = run->second.size < best->second.size;
    if (fits == best_fits ? (fits ? smaller : run->second.size > best->second.size) : fits) {
      best = run;
    }
  }
  return best;
}

PageAllocator::Runs::iterator PageAllocator::longest_claimed() {
  return std::max_element(runs_.begin(), runs_.end(), [](const auto& a, const auto& b) {
    return a.second.size < b.second.size;
  });
}

void PageAllocator::take_front(Runs::iterator run, std::int32_t count,
                               std::vector<std::int32_t>& pages) {
  const std::int32_t first = run->first;
  const Run rest{run->second.size - count, run->second.claimed};
  runs_.erase(run);
  if (rest.size > 0) runs_.emplace(first + count, rest);
  pages.resize(pages.size() + static_cast<std::size_t>(count));
  std::iota(pages.end() - count, pages.end(), first);
  num_free_ -= count;
}

// Adds an unclaimed run, what of it lies below the target, and joins it with the unclaimed runs
// that touch it.
void PageAllocator::insert_free(std::int32_t first, std::int32_t size) {
  if (first + size > target_) {
    const std::int32_t beyond = std::max(first, target_);
    insert_drained(beyond, first + size - beyond);
    size = beyond - first;
    if (size <= 0) return;
  }
  num_free_ += size;
  auto next = runs_.lower_bound(first);
  if (next != runs_.begin()) {
    const auto before = std::prev(next);
    if (!before->second.claimed && before->first + before->second.size == first) {
      first = before->first;
      size += before->second.size;
      runs_.erase(before);
    }
  }
  if (next != runs_.end() && !next->second.claimed && first + size == next->first) {
    size += next->second.size;
    runs_.erase(next);
  }
  runs_[first] = Run{size, false};
}

void PageAllocator::insert_drained(std::int32_t first, std::int32_t size) {
  const auto next = drained_.lower_bound(first);
  if (next != drained_.end() && first + size == next->first) {
    size += next->second;
    drained_.erase(next);
  }
  const auto behind = drained_.lower_bound(first);
  if (behind != drained_.begin()) {
    const auto before = std::prev(behind);
    if (before->first + before->second == first) {
      before->second += size;
      return;
    }
  }
  drained_.emplace(first, size);
}

void PageAllocator::unclaim(std::int32_t first) {
  const auto run = runs_.find(first);
  if (run == runs_.end() || !run->second.claimed) return;
  const std::int32_t size = run->second.size;
  runs_.erase(run);
  num_free_ -= size;
  insert_free(first, size);
}

}  // namespace sparse_kvcm
