// Lengths of seated rows.
#include "core/check.hpp"
#include "manager/batch_state.hpp"

namespace sparse_kvcm {

void BatchState::check_resize(const char* function) const {
  check_open(function);
  if (step_open_) {
    fail_state(function, "a step is open; call record_read or abort_step first");
  }
}

// Also refuses a row that the call has named before.
Request& BatchState::seated_row(const char* function, std::int32_t row) {
  if (row < 0 || row >= options_.max_rows || at(row) == nullptr) {
    fail_argument(function, "row must be a seated row in [0, ", options_.max_rows, "), got ", row);
  }
  if (!named_.insert(row)) fail_argument(function, "row ", row, " is named twice");
  return *at(row);
}

std::vector<ResizeResult> BatchState::resize(std::span<const RowLength> lengths) {
  const char* function = "Batch.resize";
  check_resize(function);
  if (manager_->has_dense_layers()) {
    fail_state(function, "the manager has dense layers; call resize_tokens");
  }
  named_.clear();
  for (const auto& [row, length] : lengths) {
    const std::int32_t committed = seated_row(function, row).committed;
    if (length < committed) {
      fail_argument(function, "length of row ", row, " must be >= its committed length ", committed,
                    ", got ", length);
    }
  }
  std::vector<ResizeResult> results;
  results.reserve(lengths.size());
  for (const auto& [row, length] : lengths) {
    // A length past what tokens can count is past the need too.
    const bool counts = length <= at(row)->need;
    results.push_back(counts ? resize_row(row, at(row)->target_units(length), 0)
                             : ResizeResult::kPastNeed);
  }
  return results;
}

std::vector<ResizeResult> BatchState::resize_tokens(std::span<const RowTokens> capacities,
                                                    Stream stream) {
  const char* function = "Batch.resize_tokens";
  check_resize(function);
  manager_->check_not_capturing(function, stream);
  named_.clear();
  for (const auto& [row, capacity] : capacities) {
    const std::int32_t history = seated_row(function, row).history;
    if (capacity < history) {
      fail_argument(function, "capacity of row ", row, " must be >= its history_length ", history,
                    ", got ", capacity);
    }
  }
  // Pages that it takes may have been read on other streams.
  if (manager_->has_dense_layers() && !capacities.empty()) manager_->timeline.enter(stream);
  std::vector<ResizeResult> results;
  results.reserve(capacities.size());
  for (const auto& [row, capacity] : capacities) {
    results.push_back(resize_row(row, at(row)->target_tokens(capacity), stream));
  }
  return results;
}

ResizeResult BatchState::resize_row(std::int32_t row, const Request::Target& target,
                                    Stream stream) {
  Request& request = *at(row);
  const std::int32_t length = request.length;
  const std::size_t pages = request.pages.size();
  const ResizeResult result = request.grow(target, stream);
  bool changed = request.length != length || request.pages.size() != pages;
  for (std::int32_t g = 0; request.dense && !changed && g < memory_.num_layer_groups; ++g) {
    changed = g != memory_.sparse_group && !request.dense->changes(g).empty();
  }
  if (changed) dirty_.insert(row);
  if (request.has_growth()) {
    growing_.insert(row);
  } else {
    growing_.erase(row);
  }
  return result;
}

}  // namespace sparse_kvcm
