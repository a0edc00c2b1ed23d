// One step of a Batch on the host: publish, wait_ready, record_read, abort_step.
#include <algorithm>

#include "core/check.hpp"
#include "manager/batch_state.hpp"

namespace sparse_kvcm {

std::vector<std::int32_t> BatchState::publish(Stream stream) {
  const char* function = "Batch.publish";
  check_open(function);
  if (step_open_) fail_state(function, "a step is open; call record_read or abort_step first");
  manager_->check_not_capturing(function, stream);
  try {
    manager_->timeline.enter(stream);
    flush(stream);
    reset_new_leases(stream);
    upload_rows(stream);
    manager_->timeline.leave(stream);
  } catch (...) {
    // How far the device got is unknown, so the next publish writes everything again.
    for (std::int32_t row = 0; row < options_.max_rows; ++row) {
      mark_dirty(row);
      published_pages_[static_cast<std::size_t>(row)] =
          static_cast<std::int32_t>(memory_.max_pages);
      const RequestPtr& request = seats_[static_cast<std::size_t>(row)];
      if (request != nullptr) request->stable_pages = 0;
    }
    throw;
  }
  std::vector<std::int32_t> uploaded(dirty_.begin(), dirty_.end());
  open_step(stream);
  return uploaded;
}

// Committed units go to the host as far as it has pages, and the watermark follows. Only rows that
// changed, or that lacked pages before, can have any.
void BatchState::flush(Stream stream) {
  std::set<std::int32_t> candidates = flush_late_;
  candidates.insert(dirty_.begin(), dirty_.end());
  std::vector<ops::UnitMove> moves;
  std::vector<Flush> flushes;
  for (const std::int32_t row : candidates) {
    const RequestPtr& request = seats_[static_cast<std::size_t>(row)];
    if (request == nullptr || request->watermark == request->committed) continue;
    flushes.push_back({request, request->plan_flush(moves)});
  }
  manager_->move_units(moves, ops::MoveDirection::kArenaToHost, stream);
  for (const Flush& flush : flushes) {
    const Request& request = *flush.request;
    if (request.watermark != flush.watermark) mark_dirty(request.row);
    flush.request->watermark = flush.watermark;
    if (flush.watermark < request.committed) {
      flush_late_.insert(request.row);
    } else {
      flush_late_.erase(request.row);
    }
  }
}

// Before the clock moves, so that a new lease's `last` is the clock of the step before its first.
void BatchState::reset_new_leases(Stream stream) {
  std::vector<ops::LeaseReset> resets;
  for (const std::int32_t row : dirty_) {
    const RequestPtr& request = seats_[static_cast<std::size_t>(row)];
    if (request != nullptr && request->reset_pending) resets.push_back(request->lease_reset());
  }
  manager_->reset_leases(resets, clock_, stream);
}

void BatchState::upload_rows(Stream stream) {
  static const std::vector<std::int32_t> no_pages(1024, kNoPage);
  std::vector<Upload> uploads;
  std::vector<RowState> states;
  states.reserve(dirty_.size());
  const auto upload_pages = [&](std::int32_t* table, const std::int32_t* pages, std::int64_t n) {
    if (n == 0) return;
    uploads.push_back({reinterpret_cast<std::byte*>(table), pages,
                       static_cast<std::size_t>(n) * sizeof(std::int32_t)});
  };
  const auto clear_pages = [&](std::int32_t* table, std::int64_t n) {
    const auto at_once = static_cast<std::int64_t>(no_pages.size());
    for (; n > 0; n -= at_once, table += at_once) {
      upload_pages(table, no_pages.data(), std::min(n, at_once));
    }
  };
  for (const std::int32_t row : dirty_) {
    const RequestPtr& request = seats_[static_cast<std::size_t>(row)];
    std::int32_t* table = memory_.page_table + row * memory_.max_pages;
    std::int64_t num_pages = 0;
    states.emplace_back();
    if (request != nullptr) {
      states.back() = request->row_state();
      states.back().window_begin = request->next_window_begin();
      num_pages = static_cast<std::int64_t>(request->pages.size());
      const std::int64_t stable = request->stable_pages;
      upload_pages(table + stable, request->pages.data() + stable, num_pages - stable);
    }
    clear_pages(table + num_pages, published_pages_[static_cast<std::size_t>(row)] - num_pages);
    uploads.push_back(
        {reinterpret_cast<std::byte*>(memory_.row_states + row), &states.back(), sizeof(RowState)});
  }
  const StepState step{clock_ + 1, 0};
  uploads.push_back({reinterpret_cast<std::byte*>(memory_.step), &step, sizeof(step)});
  manager_->backend->upload(uploads, stream);
}

// The device has everything: what was planned becomes what is.
void BatchState::open_step(Stream stream) noexcept {
  for (const std::int32_t row : dirty_) {
    const RequestPtr& request = seats_[static_cast<std::size_t>(row)];
    std::int32_t num_pages = 0;
    if (request != nullptr) {
      request->window_begin = request->next_window_begin();
      request->reset_pending = false;
      num_pages = request->stable_pages = static_cast<std::int32_t>(request->pages.size());
    }
    published_pages_[static_cast<std::size_t>(row)] = num_pages;
  }
  dirty_.clear();
  step_ = seats_;
  for (const RequestPtr& request : step_) {
    if (request != nullptr) request->step = this;
  }
  clock_ += 1;
  step_open_ = true;
  step_stream_ = stream;
}

void BatchState::wait_ready(Stream stream) {
  check_step("Batch.wait_ready");
  manager_->check_not_capturing("Batch.wait_ready", stream);
  manager_->timeline.enter(stream);
  const StepState step{clock_, 1};
  const Upload upload{reinterpret_cast<std::byte*>(memory_.step), &step, sizeof(step)};
  manager_->backend->upload({&upload, 1}, stream);
  manager_->timeline.leave(stream);
  step_stream_ = stream;
}

void BatchState::record_read(std::span<const std::int32_t> rows, Stream stream) {
  const char* function = "Batch.record_read";
  check_step(function);
  manager_->check_not_capturing(function, stream);
  std::set<std::int32_t> committed;
  for (const std::int32_t row : rows) {
    if (row < 0 || row >= options_.max_rows || step_[static_cast<std::size_t>(row)] == nullptr) {
      fail_argument(function, "rows must have been seated at publish, in [0, ", options_.max_rows,
                    "), got ", row);
    }
    if (!committed.insert(row).second) fail_argument(function, "row ", row, " is named twice");
  }
  manager_->timeline.enter(stream);
  close_on_device(stream);
  manager_->timeline.leave(stream);
  end_step(committed);
}

void BatchState::abort_step(Stream stream) {
  check_step("Batch.abort_step");
  manager_->check_not_capturing("Batch.abort_step", stream);
  std::vector<ops::LeaseReset> resets;
  for (const RequestPtr& request : step_) {
    if (request != nullptr && request->state == KvCacheState::kActive) {
      resets.push_back(request->lease_reset());
    }
  }
  manager_->timeline.enter(stream);
  manager_->reset_leases(resets, clock_, stream);
  close_on_device(stream);
  manager_->timeline.leave(stream);
  end_step({});
}

void BatchState::drop_step() noexcept {
  for (const RequestPtr& request : step_) {
    if (request != nullptr) request->reset_pending = request->lease.has_value();
  }
  end_step({});
}

void BatchState::close_on_device(Stream stream) {
  const StepState step{clock_, 0};
  const Upload upload{reinterpret_cast<std::byte*>(memory_.step), &step, sizeof(step)};
  manager_->backend->upload({&upload, 1}, stream);
  errors_.collect(clock_, stream);
}

// Rows outside `committed_rows` get back the length that they had at publish.
void BatchState::end_step(const std::set<std::int32_t>& committed_rows) noexcept {
  for (std::int32_t row = 0; row < options_.max_rows; ++row) {
    const RequestPtr& request = step_[static_cast<std::size_t>(row)];
    if (request == nullptr) continue;
    const bool commits = committed_rows.count(row) > 0;
    if (request->length != request->committed && request->batch == this) mark_dirty(request->row);
    request->end_step(commits ? request->length : request->committed);
  }
  step_.clear();
  step_open_ = false;
}

}  // namespace sparse_kvcm
