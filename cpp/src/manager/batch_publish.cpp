// What a publish sends: flushes, emptied leases, and the words of row states and tables that
// changed. Planned first, on the host alone; then sent in three calls of the backend at most.
#include <algorithm>

#include "manager/batch_state.hpp"

namespace sparse_kvcm {

// Committed units go to the host as far as it has pages, and the watermark follows.
void BatchState::plan_flush() {
  moves_.clear();
  flushes_.clear();
  unflushed_.for_each([&](std::int32_t row) {
    Request& request = *at(row);
    flushes_.push_back({&request, request.plan_flush(moves_)});
    if (flushes_.back().watermark != request.watermark) dirty_.insert(row);
  });
}

void BatchState::finish_flush() {
  for (const Flush& flush : flushes_) {
    flush.request->watermark = flush.watermark;
    if (flush.watermark == flush.request->committed) unflushed_.erase(flush.request->row);
  }
}

// Before the clock moves, so that a new lease's `last` is the clock of the step before its first.
void BatchState::plan_resets() {
  resets_.clear();
  dirty_.for_each([&](std::int32_t row) {
    if (at(row) != nullptr && at(row)->reset_pending) resets_.push_back(at(row)->lease_reset());
  });
}

// With the watermarks that the flush of this publish reaches.
void BatchState::plan_upload() {
  patch_.clear();
  auto flush = flushes_.begin();  // in the order of rows, too
  dirty_.for_each([&](std::int32_t row) {
    const Request* request = at(row).get();
    RowState state;
    if (request != nullptr) {
      state = request->row_state();
      state.window_begin = request->next_window_begin();
      while (flush != flushes_.end() && flush->request->row < row) ++flush;
      if (flush != flushes_.end() && flush->request == request) state.watermark = flush->watermark;
    }
    patch_.write(reinterpret_cast<const std::int32_t*>(memory_.row_states + row),
                 {reinterpret_cast<const std::int32_t*>(&state), sizeof(state) / 4});
    if (patch_tables(row, request)) table_rows_.push_back(row);
  });
}

bool BatchState::patch_tables(std::int32_t row, const Request* request) {
  bool changed = false;
  for (std::int32_t g = 0; g < memory_.num_layer_groups; ++g) {
    changed = patch_table(g, row, request) || changed;
  }
  return changed;
}

bool BatchState::patch_table(std::int32_t layer_group, std::int32_t row, const Request* request) {
  const bool sparse = layer_group == memory_.sparse_group;
  std::span<const std::int32_t> pages;
  if (request != nullptr) {
    pages = sparse ? std::span<const std::int32_t>(request->pages)
                   : request->dense->get_base_page_indices(layer_group);
  }
  const auto size = static_cast<std::int32_t>(pages.size());
  const std::int32_t before = published(layer_group, row);
  const std::int32_t* table = memory_.table(layer_group, row);
  bool wrote = before != size || whole_.contains(row);
  if (sparse || whole_.contains(row)) {
    const std::int32_t stable = sparse && request != nullptr ? request->stable_pages : 0;
    patch_.write(table + stable, pages.subspan(static_cast<std::size_t>(stable)));
    wrote = wrote || stable < size;
  } else {
    for (const std::int32_t page : request->dense->changes(layer_group)) {
      if (page >= size) continue;
      patch_.write(table + page, pages[static_cast<std::size_t>(page)]);
      wrote = true;
    }
  }
  if (before > size) patch_.erase(table + size, before - size);
  if (before != size || whole_.contains(row)) patch_.write(memory_.count(layer_group, row), size);
  return wrote;
}

void BatchState::send(Stream stream) {
  manager_->move_units(moves_, ops::MoveDirection::kArenaToHost, stream);
  manager_->reset_leases(resets_, clock_, stream);
  patch_.send(*manager_->backend, stream);
}

// The device has everything: what was planned becomes what is.
void BatchState::open_step(Stream stream) noexcept {
  dirty_.for_each([&](std::int32_t row) {
    Request* request = at(row).get();
    for (std::int32_t g = 0; g < memory_.num_layer_groups; ++g) {
      std::int32_t pages = 0;
      if (request != nullptr && g == memory_.sparse_group) {
        pages = static_cast<std::int32_t>(request->pages.size());
      } else if (request != nullptr) {
        pages = static_cast<std::int32_t>(request->dense->get_base_page_indices(g).size());
      }
      published(g, row) = pages;
    }
    if (request == nullptr) return;
    request->window_begin = request->next_window_begin();
    request->reset_pending = false;
    request->stable_pages = static_cast<std::int32_t>(request->pages.size());
    if (request->dense) request->dense->forget_changes();
  });
  dirty_.clear();
  whole_.clear();
  steps_ += 1;
  clock_ += 1;
  step_open_ = true;
  step_stream_ = stream;
}

// How far a failed device got is unknown, so the next publish writes everything again.
void BatchState::distrust_device() noexcept {
  dirty_.insert_all();
  whole_.insert_all();
  std::ranges::fill(published_, static_cast<std::int32_t>(memory_.max_pages));
  for (const RequestPtr& request : seats_) {
    if (request != nullptr) request->stable_pages = 0;
  }
}

}  // namespace sparse_kvcm
