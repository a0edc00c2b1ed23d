// The model's decode steps: resize, publish, record_read and abort_step.
#include <algorithm>

#include "program_model.hpp"

namespace sparse_kvcm::testing {

Refusals Model::refuses_resize(std::int32_t b, std::span<const RowLength> lengths) const {
  const ModelBatch& batch = batches_[at(b)];
  if (batch.closed || batch.step_open) return kState;
  std::vector<std::uint8_t> named(batch.seats.size(), 0);
  for (const RowLength& l : lengths) {
    if (l.row < 0 || l.row >= batch.options.max_rows) return kArgument;
    const std::int32_t i = batch.seats[at(l.row)];
    if (i == kNobody || named[at(l.row)]++ || l.length < requests_[at(i)].committed)
      return kArgument;
  }
  return kNone;
}

bool Model::allows_resize(const ModelRequest& r, std::int32_t length, ResizeResult result,
                          std::int64_t free_pages) const {
  const std::int64_t pages = static_cast<std::int64_t>(r.pages.size()) + free_pages;
  const std::int64_t in_host = pages * config_.units_per_page();
  const auto reached = static_cast<std::int32_t>(std::min<std::int64_t>(r.committed, in_host));
  const bool past_need = length > r.need;
  const bool past_window = length - r.window_slots > std::max(reached, r.watermark);
  const bool past_new_units = length - r.committed > config_.max_new_units;
  switch (result) {
    case ResizeResult::kOk:
      return !past_need && !past_window && !past_new_units;
    case ResizeResult::kPastNeed:
      return past_need;
    case ResizeResult::kPastWindow:
      return past_window;
    case ResizeResult::kPastNewUnits:
      return past_new_units;
    case ResizeResult::kOutOfPages:
      return false;  // there are no dense layers
  }
  return false;
}

void Model::resize(std::int32_t i, std::int32_t length) {
  ModelRequest& r = requests_[at(i)];
  r.length = length;
  touch(i);
}

Refusals Model::refuses_publish(std::int32_t b) const {
  const ModelBatch& batch = batches_[at(b)];
  return batch.closed || batch.step_open ? kState : kNone;
}

Refusals Model::refuses_in_step(std::int32_t b) const {
  const ModelBatch& batch = batches_[at(b)];
  return batch.closed || !batch.step_open ? kState : kNone;
}

Refusals Model::refuses_record(std::int32_t b, std::span<const std::int32_t> rows) const {
  const ModelBatch& batch = batches_[at(b)];
  if (batch.closed || !batch.step_open) return kState;
  std::vector<std::uint8_t> named(batch.device.size(), 0);
  for (const std::int32_t row : rows) {
    if (row < 0 || row >= batch.options.max_rows) return kArgument;
    if (batch.device[at(row)].request == kNobody || named[at(row)]++) return kArgument;
  }
  return kNone;
}

// A page that is there is filled: the watermark stops short of the committed length only where the
// pages do.
void Model::raise_watermark(ModelRequest& r) const {
  const std::int64_t in_host = static_cast<std::int64_t>(r.pages.size()) * config_.units_per_page();
  const auto reached = static_cast<std::int32_t>(std::min<std::int64_t>(r.committed, in_host));
  r.watermark = std::max(r.watermark, reached);
}

void Model::publish(std::int32_t b, std::uint32_t version) {
  ModelBatch& batch = batches_[at(b)];
  for (std::size_t row = 0; row < batch.seats.size(); ++row) {
    batch.device[row] = {};
    const std::int32_t i = batch.seats[row];
    if (i == kNobody) continue;
    ModelRequest& r = requests_[at(i)];
    raise_watermark(r);
    r.window_begin = std::max(r.window_begin, r.length - r.window_slots);
    r.step_batch = b;
    std::fill(r.versions.begin() + r.committed, r.versions.begin() + r.length, version);
    batch.device[row] = {i,
                         {r.lease->id, r.lease->base, r.cached_slots, r.window_slots, r.length,
                          r.committed, r.window_begin, r.watermark},
                         r.pages.size(),
                         r.lease->generation};
  }
  ++batch.clock;
  batch.failed_publish = false;
  batch.step_open = true;
  std::fill(batch.touched.begin(), batch.touched.end(), 0);
  std::fill(batch.resolved.begin(), batch.resolved.end(), 0);
}

void Model::fail_publish(std::int32_t b) {
  ModelBatch& batch = batches_[at(b)];
  batch.failed_publish = true;
  std::fill(batch.touched.begin(), batch.touched.end(), std::uint8_t{1});
}

bool Model::set_watermark(std::int32_t i, std::int32_t watermark) {
  ModelRequest& r = requests_[at(i)];
  const std::int32_t before = r.watermark;
  raise_watermark(r);
  const bool allowed = before <= watermark && watermark <= r.watermark;
  r.watermark = watermark;
  return allowed;
}

void Model::record_read(std::int32_t b, std::span<const std::int32_t> rows) { end_step(b, rows); }

void Model::end_step(std::int32_t b, std::span<const std::int32_t> committed_rows) {
  ModelBatch& batch = batches_[at(b)];
  for (std::int32_t row = 0; row < batch.options.max_rows; ++row) {
    const std::int32_t i = batch.device[at(row)].request;
    if (i == kNobody) continue;
    ModelRequest& r = requests_[at(i)];
    r.step_batch = kNobody;
    if (r.state == KvCacheState::kClosed) {
      r.holds_memory = false;
      continue;
    }
    touch(i);
    const bool commits =
        std::find(committed_rows.begin(), committed_rows.end(), row) != committed_rows.end();
    (commits ? r.committed : r.length) = commits ? r.length : r.committed;
  }
  batch.step_open = batch.device_open = false;
  for (std::int32_t row = 0; row < batch.options.max_rows; ++row)
    for (std::int32_t group = 0; group < num_groups(); ++group) {
      std::uint32_t& bits = batch.errors[cell(row, group)];
      if (bits != 0) batch.reported.rows.push_back({row, group, bits, batch.clock});
      bits = 0;
    }
  batch.reported.batch |= batch.batch_error;
  batch.batch_error = 0;
}

}  // namespace sparse_kvcm::testing
