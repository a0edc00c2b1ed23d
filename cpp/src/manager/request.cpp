#include "manager/request.hpp"

#include <algorithm>

#include "core/check.hpp"
#include "core/row_state.hpp"
#include "manager/batch_state.hpp"

namespace sparse_kvcm {

Request::Request(std::shared_ptr<ManagerState> manager, const KvCacheOptions& options)
    : need(options.need), manager_(std::move(manager)), shape_(manager_->lease_shape(options)) {}

bool Request::resume(Stream stream) {
  check_open("KvCache.resume");
  if (state == KvCacheState::kActive) return true;
  manager_->check_not_capturing("KvCache.resume", stream);
  lease = manager_->arena.leases().acquire(shape_.cached_slots, shape_.window_slots);
  if (!lease) return false;
  try {
    if (all_window()) load_window(0, committed, stream);
  } catch (...) {
    return_lease();
    throw;
  }
  window_begin = all_window() ? 0 : committed;
  reset_pending = true;
  state = KvCacheState::kActive;
  return true;
}

void Request::suspend(Stream stream) {
  check_open("KvCache.suspend");
  if (state == KvCacheState::kSuspended) return;
  check_not_in_step("KvCache.suspend");
  manager_->check_not_capturing("KvCache.suspend", stream);
  const auto pages_before = static_cast<std::int32_t>(pages.size());
  std::vector<ops::UnitMove> moves;
  try {
    if (plan_flush(moves) < committed) {
      throw OutOfPages(message("KvCache.suspend", "host history has no page for ",
                               committed - watermark, " window units; close or shrink others"));
    }
    manager_->timeline.enter(stream);
    manager_->move_units(moves, ops::MoveDirection::kArenaToHost, stream);
    manager_->timeline.leave(stream);
  } catch (...) {
    manager_->history.keep_pages(pages, pages_before);
    throw;
  }
  leave_seat();
  return_lease();
  length = watermark = window_begin = committed;
  trim_pages(committed);
  state = KvCacheState::kSuspended;
}

void Request::import_history(std::span<const UnitRows> layers, std::int32_t num_units,
                             Stream stream) {
  check_import(layers, num_units);
  manager_->check_not_capturing("KvCache.import_history", stream);
  const auto pages_before = static_cast<std::int32_t>(pages.size());
  const std::int32_t new_length = committed + num_units;
  try {
    if (!take_pages(new_length)) {
      throw OutOfPages(message("KvCache.import_history", "host history lacks pages for ", num_units,
                               " units: ", manager_->history.num_free_pages(),
                               " are free beyond those taken; close or shrink others"));
    }
    manager_->timeline.join();
    std::size_t first_layer = 0;
    for (std::int32_t group = 0; group < manager_->num_groups(); ++group) {
      const std::size_t members =
          manager_->config.groups[static_cast<std::size_t>(group)].layers.size();
      manager_->history.write(group, layers.subspan(first_layer, members), pages, committed,
                              num_units);
      first_layer += members;
    }
    if (all_window()) load_window(committed, new_length, stream);
  } catch (...) {
    manager_->history.keep_pages(pages, pages_before);
    throw;
  }
  length = committed = watermark = new_length;
  window_begin = all_window() ? 0 : new_length;
  if (batch != nullptr) batch->mark_dirty(row);
}

void Request::close() noexcept {
  if (state == KvCacheState::kClosed) return;
  state = KvCacheState::kClosed;
  leave_seat();
  if (step == nullptr) end_step(0);
}

ResizeResult Request::resize(std::int32_t new_length) {
  if (new_length > need) return ResizeResult::kPastNeed;
  if (new_length - committed > manager_->config.max_new_units) return ResizeResult::kPastNewUnits;
  const auto pages_before = static_cast<std::int32_t>(pages.size());
  take_pages(new_length);
  if (new_length > std::int64_t{lease->window_slots} + reach()) {
    manager_->history.keep_pages(pages, pages_before);
    return ResizeResult::kPastWindow;
  }
  trim_pages(new_length);
  length = new_length;
  return ResizeResult::kOk;
}

std::int32_t Request::plan_flush(std::vector<ops::UnitMove>& moves) {
  take_pages(committed);
  const std::int32_t target = reach();
  for (std::int32_t ordinal = watermark; ordinal < target; ++ordinal) {
    moves.push_back(
        {manager_->history.host_unit(pages, ordinal), window_slot(row_state(), ordinal)});
  }
  return std::max(target, watermark);
}

void Request::end_step(std::int32_t new_length) noexcept {
  step = nullptr;
  if (state == KvCacheState::kClosed) {
    return_lease();
    manager_->history.keep_pages(pages, 0);
    length = committed = watermark = window_begin = 0;
    return;
  }
  length = committed = new_length;
  trim_pages(new_length);
}

std::int32_t Request::next_window_begin() const {
  return std::max(window_begin, length - lease->window_slots);
}

RowState Request::row_state() const {
  return {lease->id, lease->base, lease->cached_slots, lease->window_slots,
          length,    committed,   window_begin,        watermark};
}

ops::LeaseReset Request::lease_reset() const {
  return {lease->id, lease->base, lease->cached_slots};
}

void Request::check_open(const char* function) const {
  if (state == KvCacheState::kClosed) fail_state(function, "the request is closed");
}

void Request::check_not_in_step(const char* function) const {
  if (step != nullptr) {
    fail_state(function, "the request is in an open step; call record_read or abort_step first");
  }
}

void Request::check_import(std::span<const UnitRows> layers, std::int32_t num_units) const {
  const char* function = "KvCache.import_history";
  check_open(function);
  check_not_in_step(function);
  if (length != committed) {
    fail_state(function, length - committed,
               " units of growth are pending; publish and record "
               "them, or resize the row back");
  }
  if (watermark != committed) {
    fail_state(function, "the watermark ", watermark, " is below the committed length ", committed,
               "; publish or suspend first");
  }
  if (num_units < 0 || num_units > need - committed) {
    fail_argument(function, "num_units must be in [0, ", need - committed, "] (need ", need,
                  ", committed ", committed, "), got ", num_units);
  }
  if (layers.size() != manager_->layers.size()) {
    fail_argument(function, "layers must have one element per member layer, ",
                  manager_->layers.size(), ", got ", layers.size());
  }
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const auto group = static_cast<std::size_t>(manager_->layer_groups[i]);
    const std::int64_t unit_bytes = manager_->config.groups[group].layout.unit_bytes();
    if (layers[i].data == nullptr && num_units > 0) {
      fail_argument(function, "layers[", i, "].data must point to ", num_units, " rows, got null");
    }
    if (layers[i].row_stride < unit_bytes) {
      fail_argument(function, "layers[", i, "].row_stride must be >= ", unit_bytes, " bytes, got ",
                    layers[i].row_stride);
    }
  }
}

void Request::load_window(std::int32_t first, std::int32_t last, Stream stream) {
  std::vector<ops::UnitMove> moves;
  for (std::int32_t ordinal = first; ordinal < last; ++ordinal) {
    moves.push_back(
        {manager_->history.host_unit(pages, ordinal), window_slot(row_state(), ordinal)});
  }
  manager_->timeline.enter(stream);
  manager_->move_units(moves, ops::MoveDirection::kHostToArena, stream);
  manager_->timeline.leave(stream);
}

std::int32_t Request::reach() const {
  const std::int64_t covered =
      static_cast<std::int64_t>(pages.size()) * manager_->config.units_per_page();
  return static_cast<std::int32_t>(std::min<std::int64_t>(committed, covered));
}

bool Request::take_pages(std::int32_t units) {
  return manager_->history.take_pages(pages, units, need);
}

void Request::trim_pages(std::int32_t units) {
  manager_->history.trim_pages(pages, units);
  stable_pages = std::min(stable_pages, static_cast<std::int32_t>(pages.size()));
}

void Request::leave_seat() noexcept {
  if (batch != nullptr) batch->detach(*this);
}

void Request::return_lease() noexcept {
  if (lease) manager_->arena.leases().release(*lease);
  lease.reset();
  reset_pending = false;
}

}  // namespace sparse_kvcm
