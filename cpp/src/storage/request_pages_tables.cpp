// What others see of a request's tables: views, copies, buffers that follow them, and what changed.
#include <algorithm>
#include <utility>

#include "core/check.hpp"
#include "sparse_kvcm/request_pages.hpp"
#include "storage/storage_state.hpp"

namespace sparse_kvcm {

std::span<const std::int32_t> RequestPages::get_base_page_indices(std::int32_t layer_group) const {
  return table("RequestPages.get_base_page_indices", layer_group).slots;
}

void RequestPages::copy_base_page_indices(std::int32_t layer_group,
                                          std::span<std::int32_t> indices) const {
  constexpr const char* kFunction = "RequestPages.copy_base_page_indices";
  const auto held = lock();
  const Table& source = table(kFunction, layer_group);
  if (indices.size() < source.slots.size()) {
    fail_argument(kFunction, "indices must have at least ", source.slots.size(),
                  " entries, one per page, got ", indices.size());
  }
  write(source, indices);
}

void RequestPages::write(const Table& table, std::span<std::int32_t> indices) {
  const auto end = std::ranges::copy(table.slots, indices.begin()).out;
  std::fill(end, indices.end(), kBadPageIndex);
}

std::vector<std::int32_t> RequestPages::copy_of_base_page_indices(std::int32_t layer_group) const {
  const auto held = lock();
  return table("RequestPages.get_base_page_indices", layer_group).slots;
}

void RequestPages::set_base_page_index_buf(std::int32_t layer_group,
                                           std::span<std::int32_t> buffer) {
  constexpr const char* kFunction = "RequestPages.set_base_page_index_buf";
  const auto held = lock();
  if (closed_) fail_state(kFunction, "the request is closed");
  static_cast<void>(table(kFunction, layer_group));
  Table& table = tables_[static_cast<std::size_t>(layer_group)];
  if (!buffer.empty() && buffer.size() < table.slots.size()) {
    fail_argument(kFunction, "buffer must have at least ", table.slots.size(),
                  " entries, one per page, got ", buffer.size());
  }
  table.buffer = buffer;
  if (!buffer.empty()) write(table, buffer);
}

void RequestPages::drop_index_bufs() noexcept {
  const auto held = lock();
  drop_buffers();
}

void RequestPages::drop_buffers() {
  for (Table& table : tables_) {
    std::ranges::fill(table.buffer, kBadPageIndex);
    table.buffer = {};
  }
}

void RequestPages::track_changes(bool on) {
  const auto held = lock();
  for (Table& table : tables_) table.changes.clear();
  track_changes_ = on;
}

std::span<const std::int32_t> RequestPages::changes(std::int32_t layer_group) const {
  return table("RequestPages.changes", layer_group).changes;
}

void RequestPages::forget_changes() {
  const auto held = lock();
  for (Table& table : tables_) table.changes.clear();
}

PageRange RequestPages::get_swa_scratch_range(std::int32_t layer_group) const {
  const auto held = lock();
  return table("RequestPages.get_swa_scratch_range", layer_group).scratch;
}

std::span<const std::int32_t> RequestPages::get_scratch_slots(std::int32_t layer_group) const {
  return table("RequestPages.get_scratch_slots", layer_group).scratch_slots;
}

std::vector<std::int32_t> RequestPages::copy_of_scratch_slots(std::int32_t layer_group) const {
  const auto held = lock();
  return table("RequestPages.get_scratch_slots", layer_group).scratch_slots;
}

bool RequestPages::has_scratch_slots() const {
  const auto held = lock();
  return any_scratch();
}

bool RequestPages::any_scratch() const {
  return std::ranges::any_of(tables_, [](const Table& t) { return !t.scratch_slots.empty(); });
}

bool RequestPages::enable_swa_scratch_reuse() const {
  const auto held = lock();
  return scratch_reuse_;
}

void RequestPages::set_enable_swa_scratch_reuse(bool enable) {
  constexpr const char* kFunction = "RequestPages.enable_swa_scratch_reuse";
  const auto held = lock();
  if (enable && !storage_->layout.config().swa_scratch_reuse) {
    fail_argument(kFunction, "must be False without swa_scratch_reuse in the config, got True");
  }
  if (!enable && any_scratch()) {
    fail_argument(kFunction, "must be True while pages of the step are in scratch, got False");
  }
  scratch_reuse_ = enable;
}

const RequestPages::Table& RequestPages::table(const char* function,
                                               std::int32_t layer_group) const {
  if (layer_group < 0 || std::cmp_greater_equal(layer_group, tables_.size())) {
    fail_argument(function, "layer_group must be in [0, ", tables_.size(), "), got ", layer_group);
  }
  return tables_[static_cast<std::size_t>(layer_group)];
}

}  // namespace sparse_kvcm
