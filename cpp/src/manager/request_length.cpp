// How a request's lengths move, and its pages with them.
#include <algorithm>

#include "core/check.hpp"
#include "core/row_state.hpp"
#include "manager/batch_state.hpp"
#include "manager/request.hpp"

namespace sparse_kvcm {

void Request::check_resize(std::int32_t capacity, std::int32_t history_length) const {
  constexpr const char* kFunction = "KvCache.resize";
  check_open(kFunction);
  if (state != KvCacheState::kActive) fail_state(kFunction, "the request is suspended; resume it");
  check_not_in_step(kFunction);
  check_not_receiving(kFunction);
  const std::int32_t per_unit = manager_->config.tokens_per_unit;
  const std::int64_t most = std::int64_t{need} * per_unit;
  if (history_length < history || history_length > capacity || capacity > most) {
    fail_argument(kFunction, "history_length must be in [", history, ", capacity] and capacity at ",
                  "most ", most, ", the need in tokens, got ", history_length, " and ", capacity);
  }
  const std::int32_t units = history_length / per_unit;
  if (batch != nullptr ? units != committed : units < committed) {
    fail_argument(kFunction, "history_length must hold ",
                  batch != nullptr ? "the " : "at least the ", committed, " committed units, got ",
                  history_length, " tokens, ", units, " units");
  }
  if (dense && dense->has_scratch_slots() && !dense->holds(history_length)) {
    fail_argument(kFunction, "history_length must be ", dense->history_length(), " or in [",
                  dense->capacity() - manager_->config.swa_scratch_reuse->max_rewind_len, ", ",
                  dense->capacity(), "] while the step at hand has pages in scratch, got ",
                  history_length, "; suspend drops that step");
  }
  const std::int32_t max_new = manager_->config.max_new_units;
  if (batch != nullptr && capacity / per_unit - committed > max_new) {
    fail_argument(kFunction, "capacity may hold ", max_new, " units beyond the ", committed,
                  " committed ones while seated, got ", capacity, " tokens");
  }
}

bool Request::resize(std::int32_t capacity, std::int32_t history_length, Stream stream) {
  check_resize(capacity, history_length);
  manager_->check_not_capturing("KvCache.resize", stream);
  if (dense) manager_->timeline.enter(stream);
  if (batch != nullptr) {
    return batch->resize_row(
               row, {capacity / manager_->config.tokens_per_unit, capacity, history_length},
               stream) == ResizeResult::kOk;
  }
  if (dense && !dense->resize(capacity, history_length, stream, StepAtHand::kRedone)) return false;
  history = tokens = history_length;
  if (manager_->is_resident()) {
    committed = watermark = window_begin = history_length / manager_->config.tokens_per_unit;
  }
  length = committed;
  trim_pages(committed);
  return true;
}

// Units of dense layers' tokens: what is there already has its tokens, each new one takes all of
// its.
Request::Target Request::target_units(std::int32_t units) const {
  const std::int32_t grown =
      units == committed ? history : units * manager_->config.tokens_per_unit;
  return {units, grown, history};
}

Request::Target Request::target_tokens(std::int32_t wanted) const {
  return {wanted / manager_->config.tokens_per_unit, wanted, history};
}

ResizeResult Request::grow(const Target& target, Stream stream) {
  const std::int64_t most_tokens = std::int64_t{need} * manager_->config.tokens_per_unit;
  if (target.length > need || target.capacity > most_tokens) return ResizeResult::kPastNeed;
  if (target.length - committed > manager_->config.max_new_units) {
    return ResizeResult::kPastNewUnits;
  }
  const auto pages_before = static_cast<std::int32_t>(pages.size());
  take_pages(target.length);
  if (lease && target.length > std::int64_t{lease->window_slots} + reach()) {
    keep_pages(pages_before);
    return ResizeResult::kPastWindow;
  }
  try {
    if (dense && !dense->resize(target.capacity, target.history, stream, StepAtHand::kRedone)) {
      keep_pages(pages_before);
      return ResizeResult::kOutOfPages;
    }
  } catch (...) {
    keep_pages(pages_before);
    throw;
  }
  trim_pages(target.length);
  length = target.length;
  tokens = target.capacity;
  history = target.history;
  return ResizeResult::kOk;
}

std::int32_t Request::plan_flush(std::vector<ops::UnitMove>& moves) {
  take_pages(committed);
  const std::int32_t target = reach();
  for (std::int32_t ordinal = watermark; lease && ordinal < target; ++ordinal) {
    moves.push_back(
        {manager_->history.host_unit(pages, ordinal), window_slot(row_state(), ordinal)});
  }
  return std::max(target, watermark);
}

void Request::end_step(Growth growth) noexcept {
  left_step = nullptr;
  if (state == KvCacheState::kClosed) {
    if (num_writers_ > 0) return;  // the last of them comes back to this
    return_lease();
    keep_pages(0);
    if (dense) dense->close();
    length = committed = watermark = window_begin = tokens = history = reserved = 0;
    return;
  }
  if (growth == Growth::kKeep) {
    committed = length;
    history = tokens;
  } else {
    length = committed;
    tokens = history;
  }
  trim_pages(length);
}

std::int32_t Request::next_window_begin() const {
  if (!lease) return committed;
  return std::max(window_begin, length - lease->window_slots);
}

std::int32_t Request::reach() const {
  if (manager_->is_resident()) return committed;
  const std::int64_t covered =
      static_cast<std::int64_t>(pages.size()) * manager_->config.units_per_page();
  return static_cast<std::int32_t>(std::min<std::int64_t>(committed, covered));
}

bool Request::take_pages(std::int32_t units) {
  const std::size_t before = pages.size();
  const bool enough = manager_->history.take_pages(pages, units, need);
  if (!enough) ++host_counter_.num_refused;
  follow_pages(before);
  return enough;
}

void Request::keep_pages(std::int32_t kept) {
  const std::size_t before = pages.size();
  manager_->history.keep_pages(pages, kept);
  follow_pages(before);
}

void Request::trim_pages(std::int32_t units) {
  const std::size_t before = pages.size();
  manager_->history.trim_pages(pages, units);
  follow_pages(before);
}

// What the index buffer, the statistics and the next publish have to know of a change.
void Request::follow_pages(std::size_t before) {
  const std::size_t now = pages.size();
  if (now == before) return;
  host_counter_.num_taken += now > before ? static_cast<std::int64_t>(now - before) : 0;
  host_counter_.num_returned += now < before ? static_cast<std::int64_t>(before - now) : 0;
  stable_pages = std::min(stable_pages, static_cast<std::int32_t>(now));
  if (host_buffer_.empty()) return;
  for (std::size_t page = std::min(before, now); page < std::max(before, now); ++page) {
    host_buffer_[page] = page < now ? pages[page] : kBadPageIndex;
  }
}

}  // namespace sparse_kvcm
