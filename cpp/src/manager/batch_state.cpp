#include "manager/batch_state.hpp"

#include <algorithm>
#include <utility>

#include "backend/ops_check.hpp"
#include "core/check.hpp"

namespace sparse_kvcm {

BatchState::BatchState(std::shared_ptr<ManagerState> manager, const BatchOptions& options)
    : manager_(std::move(manager)),
      options_(options),
      id_(manager_->next_batch_id++),
      memory_(manager_->config, options, *manager_->backend),
      errors_(*manager_, memory_, options.max_rows),
      seats_(static_cast<std::size_t>(options.max_rows)),
      // Unknown until the first publish, which writes -1 everywhere.
      published_pages_(seats_.size(), static_cast<std::int32_t>(memory_.max_pages)) {
  step_.reserve(seats_.size());  // so that opening a step cannot fail
  for (std::int32_t row = 0; row < options_.max_rows; ++row) mark_dirty(row);
  // Launches before the first publish find nobody seated.
  const std::vector<RowState> nobody(seats_.size());
  const Upload upload{reinterpret_cast<std::byte*>(memory_.row_states), nobody.data(),
                      nobody.size() * sizeof(RowState)};
  manager_->timeline.enter(0);
  manager_->backend->upload({&upload, 1}, 0);
  manager_->timeline.leave(0);
}

std::int32_t BatchState::add(const RequestPtr& request) {
  check_open("Batch.add");
  if (request->batch == this) return request->row;
  check_may_sit(*request);
  const auto free = std::find(seats_.begin(), seats_.end(), nullptr);
  if (free == seats_.end()) {
    fail_state("Batch.add", "all ", options_.max_rows, " rows are taken; remove a request first");
  }
  return seat(request, static_cast<std::int32_t>(free - seats_.begin()));
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
  if (seats_[static_cast<std::size_t>(row)] != nullptr) {
    fail_argument("Batch.add", "row must be free, got the occupied row ", row);
  }
  return seat(request, row);
}

void BatchState::remove(const Request& request) {
  check_open("Batch.remove");
  if (request.batch != this) fail_state("Batch.remove", "the request does not sit in this Batch");
  detach(*seats_[static_cast<std::size_t>(request.row)]);
}

void BatchState::detach(Request& request) noexcept {
  const std::int32_t row = request.row;
  mark_dirty(row);
  flush_late_.erase(row);
  request.batch = nullptr;
  request.row = -1;
  request.stable_pages = 0;
  seats_[static_cast<std::size_t>(row)].reset();
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

std::vector<ResizeResult> BatchState::resize(std::span<const RowLength> lengths) {
  const char* function = "Batch.resize";
  check_open(function);
  if (step_open_) {
    fail_state(function, "a step is open; call record_read or abort_step first");
  }
  std::set<std::int32_t> rows;
  for (const auto& [row, length] : lengths) {
    if (row < 0 || row >= options_.max_rows || seats_[static_cast<std::size_t>(row)] == nullptr) {
      fail_argument(function, "row must be a seated row in [0, ", options_.max_rows, "), got ",
                    row);
    }
    if (!rows.insert(row).second) fail_argument(function, "row ", row, " is named twice");
    const std::int32_t committed = seats_[static_cast<std::size_t>(row)]->committed;
    if (length < committed) {
      fail_argument(function, "length of row ", row, " must be >= its committed length ", committed,
                    ", got ", length);
    }
  }
  std::vector<ResizeResult> results;
  for (const auto& [row, length] : lengths) {
    Request& request = *seats_[static_cast<std::size_t>(row)];
    const auto before = std::pair(request.length, request.pages.size());
    results.push_back(request.resize(length));
    if (before != std::pair(request.length, request.pages.size())) mark_dirty(row);
  }
  return results;
}

void BatchState::resolve(std::int32_t group, const std::int32_t* rows, std::int32_t b,
                         const std::int32_t* selection, std::int32_t k,
                         std::int64_t selection_stride, const ResolveOutputs& outputs,
                         Stream stream) {
  const char* function = "Batch.resolve";
  check_launch(function, group, rows, b, k);
  if (selection == nullptr && b > 0) {
    fail_argument(function, "selection must point to ", b, " rows of ", k, ", got null");
  }
  if (selection_stride < k) {
    fail_argument(function, "selection_stride must be >= k ", k, ", got ", selection_stride);
  }
  const ResolveOutputs out = with_defaults(group, outputs);
  ops::ResolveParams params;
  params.launch = launch_rows(rows, b);
  params.selection = selection;
  params.selection_stride = selection_stride;
  params.k = k;
  params.step = memory_.step;
  params.entries = manager_->arena.entries(group);
  params.num_slots = manager_->arena.num_slots();
  params.last = manager_->arena.last(group);
  params.num_leases = manager_->config.max_leases;
  params.max_new_units = manager_->config.max_new_units;
  params.no_write_slot = options_.no_write_slot;
  params.max_units = options_.max_units;
  params.slots = out.slots;
  params.write_slots = out.write_slots;
  params.miss_ordinals = out.miss_ordinals;
  params.miss_slots = out.miss_slots;
  params.miss_counts = out.miss_counts;
  params.hit_counts = out.hit_counts;
  params.errors = launch_errors(group, out);
  check(params);
  if (b > 0) manager_->backend->resolve(params, stream);
}

void BatchState::fetch(std::int32_t group, const std::int32_t* rows, std::int32_t b, std::int32_t k,
                       const ResolveOutputs& outputs, Stream stream) {
  check_launch("Batch.fetch", group, rows, b, k);
  const ResolveOutputs out = with_defaults(group, outputs);
  ops::FetchParams params;
  params.launch = launch_rows(rows, b);
  params.step = memory_.step;
  params.miss_ordinals = out.miss_ordinals;
  params.miss_slots = out.miss_slots;
  params.miss_counts = out.miss_counts;
  params.k = k;
  params.page_table = memory_.page_table;
  params.max_pages = memory_.max_pages;
  params.memory = manager_->memory(group);
  params.errors = launch_errors(group, out);
  params.cursor = out.cursor;
  check(params);
  if (b > 0) manager_->backend->fetch(params, stream);
}

StepErrors BatchState::take_errors() {
  check_open("Batch.take_errors");
  return errors_.take();
}

ResolveOutputs BatchState::outputs(std::int32_t group) const {
  manager_->check_group("Batch.outputs", group);
  return memory_.outputs[static_cast<std::size_t>(group)];
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
  if (request.step != nullptr && request.step != this) {
    fail_state(function, "the request is in another Batch's open step");
  }
  if (request.need > options_.max_units) {
    fail_argument(function, "the request's need must be <= max_units ", options_.max_units,
                  ", got ", request.need);
  }
}

void BatchState::check_launch(const char* function, std::int32_t group, const std::int32_t* rows,
                              std::int32_t b, std::int32_t k) const {
  check_open(function);
  manager_->check_group(function, group);
  if (b < 0 || b > options_.max_rows) {
    fail_argument(function, "b must be in [0, ", options_.max_rows, "], got ", b);
  }
  const std::int32_t top_k = manager_->config.groups[static_cast<std::size_t>(group)].top_k;
  if (k < 1 || k > top_k) {
    fail_argument(function, "k must be in [1, ", top_k, "] (top_k of group ", group, "), got ", k);
  }
  if (rows == nullptr && b > 0) {
    fail_argument(function, "rows must point to ", b, " elements, got null");
  }
}

std::int32_t BatchState::seat(const RequestPtr& request, std::int32_t row) {
  if (request->last_batch_id != id_) request->reset_pending = true;
  request->last_batch_id = id_;
  request->batch = this;
  request->row = row;
  seats_[static_cast<std::size_t>(row)] = request;
  mark_dirty(row);
  return row;
}

ResolveOutputs BatchState::with_defaults(std::int32_t group, ResolveOutputs outputs) const {
  const ResolveOutputs& own = memory_.outputs[static_cast<std::size_t>(group)];
  // A launch on misses of its own may run beside one on the Batch's, and a cursor serves one.
  if (outputs.miss_counts == nullptr && outputs.cursor == nullptr) outputs.cursor = own.cursor;
  if (outputs.slots == nullptr) outputs.slots = own.slots;
  if (outputs.write_slots == nullptr) outputs.write_slots = own.write_slots;
  if (outputs.miss_ordinals == nullptr) outputs.miss_ordinals = own.miss_ordinals;
  if (outputs.miss_slots == nullptr) outputs.miss_slots = own.miss_slots;
  if (outputs.miss_counts == nullptr) outputs.miss_counts = own.miss_counts;
  if (outputs.hit_counts == nullptr) outputs.hit_counts = own.hit_counts;
  if (outputs.errors == nullptr) outputs.errors = own.errors;
  return outputs;
}

ops::LaunchRows BatchState::launch_rows(const std::int32_t* rows, std::int32_t b) const {
  return {rows, b, memory_.row_states, options_.max_rows};
}

ops::LaunchErrors BatchState::launch_errors(std::int32_t group,
                                            const ResolveOutputs& outputs) const {
  return {outputs.errors, memory_.row_errors + std::int64_t{group} * options_.max_rows,
          memory_.batch_error};
}

}  // namespace sparse_kvcm
