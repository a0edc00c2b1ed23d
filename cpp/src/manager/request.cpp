#include "manager/request.hpp"

#include <algorithm>
#include <utility>

#include "core/check.hpp"
#include "core/rounding.hpp"
#include "core/row_state.hpp"
#include "manager/batch_state.hpp"
#include "manager/device_work.hpp"
#include "storage/page_migration.hpp"

namespace sparse_kvcm {

Request::Request(std::shared_ptr<ManagerState> manager, const KvCacheOptions& options)
    : need(options.need), manager_(std::move(manager)), shape_(manager_->lease_shape(options)) {
  if (manager_->has_dense_layers()) {
    dense = std::make_unique<RequestPages>(manager_->storage->state(), 0, PageScope::kDense);
  }
}

bool Request::resume(Stream stream) {
  check_open("KvCache.resume");
  if (state == KvCacheState::kActive) return true;
  manager_->check_not_capturing("KvCache.resume", stream);
  if (!manager_->is_resident()) {
    lease = manager_->arena.leases().acquire(shape_.cached_slots, shape_.window_slots);
    if (!lease) return false;
  }
  try {
    std::optional<PageMigration> migration;
    if (dense) {
      migration.emplace(*dense, PageDirection::kToDevice);
      if (!migration->reserve(dense->history_length(), stream)) {
        return_lease();
        return false;
      }
    }
    if (all_window() || dense) {
      DeviceWork work(*manager_, "KvCache.resume", stream);
      if (all_window()) load_window(0, committed, stream);
      if (migration) migration->copy(stream);
      work.leave();
    }
    if (migration) {
      manager_->copies.pages_to_gpu += migration->num_pages();
      manager_->copies.bytes_to_gpu += migration->num_bytes();
      migration->commit(manager_->timeline.newest());
    }
  } catch (...) {
    return_lease();
    throw;
  }
  window_begin = all_window() ? 0 : committed;
  reset_pending = lease.has_value();
  state = KvCacheState::kActive;
  return true;
}

void Request::suspend(Stream stream) {
  constexpr const char* kFunction = "KvCache.suspend";
  check_open(kFunction);
  if (state == KvCacheState::kSuspended) return;
  check_not_in_step(kFunction);
  check_not_receiving(kFunction);
  manager_->check_not_capturing(kFunction, stream);
  const auto pages_before = static_cast<std::int32_t>(pages.size());
  std::optional<PageMigration> migration;
  try {
    std::vector<ops::UnitMove> moves;
    if (plan_flush(moves) < committed) {
      throw OutOfPages(message(kFunction, "host history has no page for ", committed - watermark,
                               " window units; close or shrink others"));
    }
    if (dense) migration.emplace(*dense, PageDirection::kToHost);
    if (dense && !migration->reserve(dense_history(), stream)) {
      throw OutOfPages(message(kFunction, "the cold pools have too few pages for those of dense ",
                               "layers; close or resume others, or raise cold_quota"));
    }
    DeviceWork work(*manager_, kFunction, stream);
    manager_->move_units(moves, ops::MoveDirection::kArenaToHost, stream);
    if (migration) migration->copy(stream);
    work.leave();
  } catch (...) {
    keep_pages(pages_before);
    throw;
  }
  leave_seat();
  if (migration) {
    manager_->copies.pages_to_host += migration->num_pages();
    manager_->copies.bytes_to_host += migration->num_bytes();
    migration->commit(manager_->timeline.newest());
  }
  return_lease();
  length = watermark = window_begin = committed;
  tokens = history;
  trim_pages(committed);
  state = KvCacheState::kSuspended;
}

void Request::close() noexcept {
  if (state == KvCacheState::kClosed) return;
  state = KvCacheState::kClosed;
  // Buffers are the caller's, who may drop them now, whatever a step still keeps.
  std::ranges::fill(host_buffer_, kBadPageIndex);
  host_buffer_ = {};
  if (dense) dense->drop_index_bufs();
  leave_seat();
  if (left_step == nullptr) end_step(Growth::kDrop);
}

std::vector<std::int32_t> Request::page_indices(std::int32_t layer_group) const {
  if (layer_group == manager_->sparse_group()) return pages;
  const auto slots = dense->get_base_page_indices(layer_group);
  return {slots.begin(), slots.end()};
}

void Request::set_index_buffer(std::int32_t layer_group, std::span<std::int32_t> buffer) {
  constexpr const char* kFunction = "KvCache.set_base_page_index_buf";
  check_open(kFunction);
  const std::int32_t most = ceil_div(need, manager_->config.units_per_page());
  if (!buffer.empty() && std::cmp_less(buffer.size(), most)) {
    fail_argument(kFunction, "buffer must have at least ", most,
                  " entries, the most pages of this request, got ", buffer.size());
  }
  if (layer_group != manager_->sparse_group()) {
    return dense->set_base_page_index_buf(layer_group, buffer);
  }
  host_buffer_ = buffer;
  std::ranges::fill(buffer, kBadPageIndex);
  std::ranges::copy(pages, buffer.begin());
}

std::vector<LayerGroupStatistics> Request::get_and_reset_statistics() {
  std::vector<LayerGroupStatistics> all(static_cast<std::size_t>(manager_->num_layer_groups()));
  if (dense) all = dense->get_and_reset_statistics();
  if (manager_->is_resident()) return all;
  all[static_cast<std::size_t>(manager_->sparse_group())] = std::exchange(host_counter_, {});
  return all;
}

RowState Request::row_state() const {
  const Lease place = lease.value_or(Lease{});
  return {place.id, place.base, place.cached_slots, place.window_slots,
          length,   committed,  window_begin,       watermark};
}

ops::LeaseReset Request::lease_reset() const {
  return {lease->id, lease->base, lease->cached_slots};
}

const BatchState* Request::step() const {
  if (left_step != nullptr) return left_step;
  return batch != nullptr && batch->has_in_step(*this) ? batch : nullptr;
}

void Request::check_open(const char* function) const {
  if (state == KvCacheState::kClosed) fail_state(function, "the request is closed");
}

void Request::check_not_in_step(const char* function) const {
  if (step() != nullptr) {
    fail_state(function, "the request is in an open step; call record_read or abort_step first");
  }
}

void Request::check_may_sit(const char* function) const {
  check_not_receiving(function);
  const std::int32_t units = history / manager_->config.tokens_per_unit;
  if (units != committed) {
    fail_state(function, "the ", history, " computed tokens have ", units, " units, of which ",
               committed, " are there; import the rest first");
  }
  if (dense && !dense->holds(history)) {
    fail_state(function, "dense layers have pages for ", dense->capacity(), " tokens, of which ",
               "some that the ", history, " computed ones need may be in scratch; resize the ",
               "request first");
  }
}

// What pages of dense layers can be kept for. What a step had in scratch is lost with it.
std::int32_t Request::dense_history() const {
  const std::int32_t most = std::min(history, dense->capacity());
  return dense->holds(most) ? most : dense->history_length();
}

void Request::load_window(std::int32_t first, std::int32_t last, Stream stream) {
  std::vector<ops::UnitMove> moves;
  for (std::int32_t ordinal = first; ordinal < last; ++ordinal) {
    moves.push_back(
        {manager_->history.host_unit(pages, ordinal), window_slot(row_state(), ordinal)});
  }
  manager_->move_units(moves, ops::MoveDirection::kHostToArena, stream);
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
