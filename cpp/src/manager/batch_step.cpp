// One step of a Batch on the host: publish, wait_ready, record_read, abort_step.
#include <algorithm>

#include "core/check.hpp"
#include "manager/batch_state.hpp"
#include "manager/device_work.hpp"

namespace sparse_kvcm {

std::vector<std::int32_t> BatchState::publish(Stream stream) {
  const char* function = "Batch.publish";
  check_open(function);
  if (step_open_) fail_state(function, "a step is open; call record_read or abort_step first");
  manager_->check_not_capturing(function, stream);
  table_rows_.clear();
  plan_flush();
  plan_resets();
  std::vector<std::int32_t> uploaded = dirty_.rows();
  if (!dirty_.empty() || !moves_.empty()) {
    try {
      DeviceWork work(*manager_, function, stream);
      plan_upload();
      send(stream);
      work.leave();
    } catch (...) {
      distrust_device();
      throw;
    }
  }
  finish_flush();
  open_step(stream);
  return uploaded;
}

void BatchState::wait_ready(Stream stream) {
  check_step("Batch.wait_ready");
  manager_->check_not_capturing("Batch.wait_ready", stream);
  const StepState step{clock_, 1};
  const Upload upload{reinterpret_cast<std::byte*>(memory_.step), &step, sizeof(step)};
  DeviceWork work(*manager_, "Batch.wait_ready", stream);
  manager_->backend->upload({&upload, 1}, stream);
  work.leave();
  step_stream_ = stream;
}

void BatchState::record_read(std::span<const std::int32_t> rows, Stream stream) {
  const char* function = "Batch.record_read";
  check_step(function);
  manager_->check_not_capturing(function, stream);
  named_.clear();
  for (const std::int32_t row : rows) {
    if (row < 0 || row >= options_.max_rows || !was_seated_at_publish(row)) {
      fail_argument(function, "rows must have been seated at publish, in [0, ", options_.max_rows,
                    "), got ", row);
    }
    if (!named_.insert(row)) fail_argument(function, "row ", row, " is named twice");
  }
  DeviceWork work(*manager_, function, stream);
  close_on_device(stream);
  work.leave();
  end_step(named_);
}

void BatchState::abort_step(Stream stream) {
  check_step("Batch.abort_step");
  manager_->check_not_capturing("Batch.abort_step", stream);
  std::vector<ops::LeaseReset> resets;
  for_each_in_step([&](const Request& request) {
    if (request.state == KvCacheState::kActive && request.lease) {
      resets.push_back(request.lease_reset());
    }
  });
  DeviceWork work(*manager_, "Batch.abort_step", stream);
  manager_->reset_leases(resets, clock_, stream);
  close_on_device(stream);
  work.leave();
  named_.clear();
  end_step(named_);
}

void BatchState::drop_step() noexcept {
  for_each_in_step([](Request& request) { request.reset_pending = request.lease.has_value(); });
  named_.clear();
  end_step(named_);
}

void BatchState::close_on_device(Stream stream) {
  const StepState step{clock_, 0};
  const Upload upload{reinterpret_cast<std::byte*>(memory_.step), &step, sizeof(step)};
  manager_->backend->upload({&upload, 1}, stream);
  errors_.collect(clock_, stream);
}

bool BatchState::was_seated_at_publish(std::int32_t row) const {
  if (at(row) != nullptr && has_in_step(*at(row))) return true;
  return std::ranges::find(left_, row, &Left::row) != left_.end();
}

template <class Visit>
void BatchState::for_each_in_step(Visit visit) const {
  for (const RequestPtr& request : seats_) {
    if (request != nullptr && has_in_step(*request)) visit(*request);
  }
  for (const Left& left : left_) visit(*left.request);
}

// Rows outside `committed_rows` get back the length that they had at publish.
void BatchState::end_step(const RowSet& committed_rows) noexcept {
  using Growth = Request::Growth;
  const auto growth_of = [&](std::int32_t row) {
    return committed_rows.contains(row) ? Growth::kKeep : Growth::kDrop;
  };
  growing_.for_each([&](std::int32_t row) {
    if (has_in_step(*at(row))) end_growth(*at(row), growth_of(row));
  });
  for (const Left& left : left_) end_growth(*left.request, growth_of(left.row));
  left_.clear();
  step_open_ = false;
}

// The request may sit here again, in whatever row.
void BatchState::end_growth(Request& request, Request::Growth growth) noexcept {
  const bool here = request.batch == this;
  if (here && request.length != request.committed) dirty_.insert(request.row);
  request.end_step(growth);
  if (!here) return;
  growing_.erase(request.row);
  if (request.watermark != request.committed) unflushed_.insert(request.row);
}

}  // namespace sparse_kvcm
