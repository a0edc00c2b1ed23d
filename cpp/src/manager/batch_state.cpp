#include "manager/batch_state.hpp"

#include <utility>

#include "core/check.hpp"
#include "manager/device_work.hpp"

namespace sparse_kvcm {

BatchState::BatchState(std::shared_ptr<ManagerState> manager, const BatchOptions& options)
    : manager_(std::move(manager)),
      options_(options),
      id_(manager_->next_batch_id++),
      memory_(manager_->config, options, manager_->storage->layout(), *manager_->backend),
      errors_(*manager_, memory_, options.max_rows),
      seats_(static_cast<std::size_t>(options.max_rows)),
      // Unknown until the first publish, which writes -1 everywhere.
      published_(seats_.size() * static_cast<std::size_t>(memory_.num_layer_groups),
                 static_cast<std::int32_t>(memory_.max_pages)),
      free_(options.max_rows),
      dirty_(options.max_rows),
      whole_(options.max_rows),
      unflushed_(options.max_rows),
      growing_(options.max_rows),
      named_(options.max_rows),
      patch_(memory_.words()) {
  free_.insert_all();
  dirty_.insert_all();
  whole_.insert_all();
  // Launches before the first publish find nobody seated.
  const std::vector<RowState> nobody(seats_.size());
  const Upload upload{reinterpret_cast<std::byte*>(memory_.row_states), nobody.data(),
                      nobody.size() * sizeof(RowState)};
  DeviceWork work(*manager_, "KvCacheManager.create_batch", 0);
  manager_->backend->upload({&upload, 1}, 0);
  work.leave();
}

std::int32_t BatchState::add(const RequestPtr& request) {
  check_open("Batch.add");
  if (request->batch == this) return request->row;
  check_may_sit(*request);
  if (free_.empty()) {
    fail_state("Batch.add", "all ", options_.max_rows, " rows are taken; remove a request first");
  }
  return seat(request, free_.first());
}

std::int32_t BatchState::add(const RequestPtr& request, std::int32_t row) {
  check_open("Batch.add");
  if (row < 0 || row >= options_.max_rows) {
    fail_argument("Batch.add", "row must be in [0, ", options_.max_rows, "), got ", row);
  }
  if (request->batch == this && request->row == row) return row;
  if (request->batch == this) {
    fail_state("Batch.add", "the request already sits in row ", request->row, ", not in ", row);
  }
  check_may_sit(*request);
  if (at(row) != nullptr) {
    fail_argument("Batch.add", "row must be free, got the occupied row ", row);
  }
  return seat(request, row);
}

std::int32_t BatchState::seat(const RequestPtr& request, std::int32_t row) {
  left_.reserve(left_.size() + seats_.size() - static_cast<std::size_t>(free_.size()) + 1);
  if (request->lease && request->last_batch_id != id_) request->reset_pending = true;
  request->last_batch_id = id_;
  request->batch = this;
  request->row = row;
  request->joined = steps_ + 1;
  if (request->dense) request->dense->track_changes(true);
  seats_[static_cast<std::size_t>(row)] = request;
  free_.erase(row);
  dirty_.insert(row);
  whole_.insert(row);
  if (request->watermark != request->committed) unflushed_.insert(row);
  if (request->has_growth()) growing_.insert(row);
  return row;
}

void BatchState::remove(const Request& request) {
  check_open("Batch.remove");
  if (request.batch != this) fail_state("Batch.remove", "the request does not sit in this Batch");
  detach(*at(request.row));
}

void BatchState::detach(Request& request) noexcept {
  const std::int32_t row = request.row;
  RequestPtr& place = seats_[static_cast<std::size_t>(row)];
  if (has_in_step(request)) {
    request.left_step = this;
    left_.push_back({place, row});  // room for it was made when it took its seat
  }
  request.batch = nullptr;
  request.row = -1;
  request.stable_pages = 0;
  if (request.dense) request.dense->track_changes(false);
  place.reset();
  free_.insert(row);
  dirty_.insert(row);
  whole_.insert(row);
  unflushed_.erase(row);
  growing_.erase(row);
}

void BatchState::close() noexcept {
  if (closed_) return;
  if (step_open_) {
    try {
      abort_step(step_stream_);
    } catch (...) {
      drop_step();  // the device is gone, and with it whoever might still read
    }
  }
  for (const RequestPtr& request : std::vector<RequestPtr>(seats_)) {
    if (request != nullptr) detach(*request);
  }
  closed_ = true;
}

void BatchState::check_open(const char* function) const {
  if (closed_) fail_state(function, "the Batch is closed");
}

void BatchState::check_step(const char* function) const {
  check_open(function);
  if (!step_open_) fail_state(function, "no step is open; call publish first");
}

void BatchState::check_may_sit(const Request& request) const {
  const char* function = "Batch.add";
  if (request.manager() != manager_) fail_state(function, "the request is another manager's");
  if (request.state == KvCacheState::kClosed) fail_state(function, "the request is closed");
  if (request.state != KvCacheState::kActive) {
    fail_state(function, "the request is suspended; resume it first");
  }
  if (request.batch != nullptr) {
    fail_state(function, "the request sits in another Batch; remove it there first");
  }
  if (request.step() != nullptr && request.step() != this) {
    fail_state(function, "the request is in another Batch's open step");
  }
  if (request.need > options_.max_units) {
    fail_argument(function, "the request's need must be <= max_units ", options_.max_units,
                  ", got ", request.need);
  }
  request.check_may_sit(function);
}

}  // namespace sparse_kvcm
