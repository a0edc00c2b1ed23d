// Steps of the random programs: resize, publish, wait_ready, record_read, abort_step.
#include <algorithm>

#include "program_driver.hpp"

namespace sparse_kvcm::testing {

void Program::finish_step(std::int32_t b) {
  if (model_.batch(b).closed) return publish(b);
  if (!model_.batch(b).step_open) {
    if (random_.percent(85)) resize(b);
    publish(b);
  }
  while (model_.batch(b).step_open) advance(b);
}

void Program::advance(std::int32_t b) {
  const ModelBatch& batch = model_.batch(b);
  if (!batch.step_open) return random_.percent(60) ? resize(b) : publish(b);
  if (random_.below(150) == 0) return abort_step(b);
  if (!batch.device_open) return random_.percent(97) ? wait_ready(b) : next_of_launches(b);
  const auto& launches = launches_[at(b)];
  const bool finished = std::all_of(launches.begin(), launches.end(),
                                    [](const Launch& l) { return l.phase == Phase::kWritten; });
  const bool done = finished && groups_to_resolve(b).empty();
  if (done ? random_.percent(96) : random_.percent(1)) return record_read(b);
  done ? abort_step(b) : next_of_launches(b);
}

// Groups in which a row of the step has not been resolved.
std::vector<std::int32_t> Program::groups_to_resolve(std::int32_t b) const {
  const ModelBatch& batch = model_.batch(b);
  std::vector<std::int32_t> groups;
  for (std::int32_t g = 0; g < model_.num_groups(); ++g)
    for (std::int32_t row = 0; row < batch.options.max_rows; ++row)
      if (batch.device[at(row)].request != kNobody && !batch.resolved[model_.cell(row, g)]) {
        groups.push_back(g);
        break;
      }
  return groups;
}

void Program::resize(std::int32_t b) {
  const ModelBatch& batch = model_.batch(b);
  std::vector<RowLength> lengths;
  for (std::int32_t row = 0; row < batch.options.max_rows; ++row) {
    const std::int32_t i = batch.seats[at(row)];
    if (i == kNobody ? random_.percent(1) : random_.percent(90)) {
      const std::int32_t committed = i == kNobody ? 0 : model_.request(i).committed;
      const std::int32_t most = manager_->config().max_new_units;
      const std::int32_t least = random_.percent(25) ? 0 : 1;
      const std::int32_t growth = random_.percent(95) ? random_.between(least, most)
                                                      : random_.pick<std::int32_t>({most + 1, 40});
      lengths.push_back({row, committed + growth});
    }
  }
  if (random_.percent(2)) lengths.push_back({random_.between(-1, batch.options.max_rows), 5});
  if (random_.percent(2) && !lengths.empty()) lengths.push_back(lengths.front());
  if (random_.percent(2) && !lengths.empty()) lengths.front().length = -1;
  random_.shuffle(lengths);
  for (const RowLength& l : lengths) trace("  resize batch", b, "row", l.row, "to", l.length);
  std::vector<ResizeResult> results;
  if (!accepted("resize", model_.refuses_resize(b, lengths),
                [&] { results = batches_[at(b)]->resize(lengths); }))
    return;
  require(results.size() == lengths.size(), "resize answers once per row");
  for (std::size_t n = 0; n < lengths.size(); ++n) {
    const std::int32_t i = batch.seats[at(lengths[n].row)];
    require(
        model_.allows_resize(model_.request(i), lengths[n].length, results[n], model_.free_pages()),
        "resize result is one that the contract gives");
    count_if(results[n] == ResizeResult::kPastNeed, Situation::kPastNeed);
    count_if(results[n] == ResizeResult::kPastWindow, Situation::kPastWindow);
    count_if(results[n] == ResizeResult::kPastNewUnits, Situation::kPastNewUnits);
    if (results[n] != ResizeResult::kOk) continue;
    model_.resize(i, lengths[n].length);
    require(model_.set_pages(i, caches_[at(i)]->host_pages()), "resize takes pages for the length");
    require(model_.allows_resize(model_.request(i), lengths[n].length, ResizeResult::kOk, 0),
            "resize takes at once the pages that its length relies on");
  }
  sync();
}

void Program::publish(std::int32_t b) {
  trace("publish batch", b);
  ModelBatch& batch = model_.batch(b);
  const Refusals refusals = model_.refuses_publish(b);
  if (refusals == kNone && random_.percent(3)) backend_->fail_after(random_.below(6));
  std::vector<std::int32_t> uploaded;
  const Outcome outcome =
      outcome_of("publish", refusals, [&] { uploaded = batches_[at(b)]->publish(0); });
  backend_->withdraw();
  if (outcome == Outcome::kRefused) return;
  for (const std::int32_t i : batch.seats)
    if (i != kNobody)
      require(model_.set_pages(i, caches_[at(i)]->host_pages()), "publish takes pages to flush");
  if (outcome == Outcome::kFailed) return failed_publish(b);
  const ModelBatch before = batch;
  model_.publish(b, ++version_);
  check_uploaded(b, uploaded, before);
  sync();
  check_device_rows(b);
}

void Program::check_uploaded(std::int32_t b, const std::vector<std::int32_t>& uploaded,
                             const ModelBatch& before) {
  const ModelBatch& batch = model_.batch(b);
  require(std::is_sorted(uploaded.begin(), uploaded.end()), "publish answers ascending rows");
  for (std::int32_t row = 0; row < batch.options.max_rows; ++row) {
    const bool sent = std::count(uploaded.begin(), uploaded.end(), row) == 1;
    const bool changed = before.device[at(row)] != batch.device[at(row)];
    require(sent || !(changed || before.failed_publish), "publish uploads what changed");
    require(!sent || changed || before.touched[at(row)], "publish uploads only what changed");
  }
  require(batches_[at(b)]->dirty_rows().empty(), "publish leaves no row dirty");
}

// Units that were flushed before the device failed may count as flushed.
void Program::failed_publish(std::int32_t b) {
  count(Situation::kFailedPublish);
  const ModelBatch& batch = model_.batch(b);
  model_.fail_publish(b);
  for (const std::int32_t i : batch.seats)
    if (i != kNobody)
      require(model_.set_watermark(i, caches_[at(i)]->watermark()),
              "a failed publish leaves the watermark or raises it");
  require(batches_[at(b)]->dirty_rows().size() == batch.seats.size(),
          "a failed publish makes every row dirty");
  sync();
  for (const std::int32_t i : batch.seats)
    if (i != kNobody) check_history(model_.request(i));
}

void Program::wait_ready(std::int32_t b) {
  trace("wait_ready batch", b);
  if (!accepted_at_last("wait_ready", model_.refuses_in_step(b),
                        [&] { batches_[at(b)]->wait_ready(0); }))
    return;
  model_.wait_ready(b);
  sync();
}

bool Program::has_unfetched(std::int32_t b) const {
  const auto& launches = launches_[at(b)];
  return std::any_of(launches.begin(), launches.end(),
                     [](const Launch& l) { return l.phase == Phase::kResolved; });
}

// Only rows that were resolved, fetched and written in every group may be committed.
std::vector<std::int32_t> Program::rows_to_commit(std::int32_t b) {
  const ModelBatch& batch = model_.batch(b);
  std::vector<std::int32_t> rows;
  for (std::int32_t row = 0; row < batch.options.max_rows; ++row) {
    std::int32_t groups = 0;
    for (const Launch& launch : launches_[at(b)])
      for (std::int32_t i = 0; i < launch.b(); ++i)
        groups +=
            launch.rows[at(i)] == row && launch.served[at(i)] && launch.phase == Phase::kWritten
                ? 1
                : 0;
    if (groups != model_.num_groups()) continue;
    const RowState& state = batch.device[at(row)].state;
    if (random_.percent(90)) {
      rows.push_back(row);
      count_if(state.length > state.committed, Situation::kCommit);
      count_if(state.length > state.committed + 1, Situation::kCommitOfSeveralUnits);
      count_if(state.length == state.committed, Situation::kStepWithoutGrowth);
    } else {
      count(Situation::kRowLeftOut);
    }
  }
  random_.shuffle(rows);
  return rows;
}

void Program::record_read(std::int32_t b) {
  if (has_unfetched(b)) return abort_step(b);
  const ModelBatch& batch = model_.batch(b);
  std::vector<std::int32_t> rows;
  if (batch.step_open) rows = rows_to_commit(b);
  for (const Launch& launch : launches_[at(b)]) check_reads(b, launch);
  for (const std::int32_t row : rows) {
    trace("  commits row", row);
    const DeviceRow& device = batch.device[at(row)];
    check_ring(model_.request(device.request), device.state.length);
  }
  trace("record_read batch", b);
  if (!accepted_at_last("record_read", model_.refuses_record(b, rows),
                        [&] { batches_[at(b)]->record_read(rows, 0); }))
    return;
  const std::vector<DeviceRow> step = batch.device;
  model_.record_read(b, rows);
  launches_[at(b)].clear();
  sync();
  after_step(step, Situation::kCommit);
}

void Program::record_badly(std::int32_t b) {
  const ModelBatch& batch = model_.batch(b);
  std::vector<std::int32_t> rows = {random_.between(-1, batch.options.max_rows)};
  if (random_.percent(50)) rows.push_back(rows.front());
  const Refusals refusals = model_.refuses_record(b, rows);
  if (refusals == kNone) return;
  trace("record_read batch", b, "badly, row", rows.front());
  accepted("record_read", refusals, [&] { batches_[at(b)]->record_read(rows, 0); });
}

void Program::count_abort(std::int32_t b) {
  count(Situation::kAbort);
  count_if(!model_.batch(b).device_open, Situation::kAbortBeforeWaitReady);
  count_if(has_unfetched(b), Situation::kAbortAfterResolve);
  const auto& launches = launches_[at(b)];
  count_if(std::any_of(launches.begin(), launches.end(),
                       [](const Launch& l) { return l.partly_written; }),
           Situation::kAbortAfterPartialWrite);
}

void Program::abort_step(std::int32_t b) {
  trace("abort_step batch", b);
  const std::vector<DeviceRow> step = model_.batch(b).device;
  if (!accepted_at_last("abort_step", model_.refuses_in_step(b),
                        [&] { batches_[at(b)]->abort_step(0); }))
    return;
  count_abort(b);
  model_.abort_step(b);
  launches_[at(b)].clear();
  sync();
  after_step(step, Situation::kAbort);
}

void Program::after_step(const std::vector<DeviceRow>& rows, Situation how) {
  for (const DeviceRow& row : rows) {
    if (row.request == kNobody) continue;
    const ModelRequest& r = model_.request(row.request);
    if (r.state == KvCacheState::kClosed) continue;
    poison_unreadable(r);
    if (how != Situation::kAbort) continue;
    for (std::int32_t group = 0; group < model_.num_groups(); ++group)
      require(residents(r.id, group).empty(), "an aborted step leaves its rows' entries empty");
    bytes_.poison_slots(r.lease->base, r.cached_slots);
  }
}

void Program::take_errors(std::int32_t b) {
  ModelBatch& batch = model_.batch(b);
  trace("take_errors batch", b);
  StepErrors got;
  if (!accepted("take_errors", batch.closed ? kState : kNone,
                [&] { got = batches_[at(b)]->take_errors(); }))
    return;
  const auto key = [](const StepError& e) { return std::tuple(e.clock, e.row, e.group, e.bits); };
  const auto by_clock = [](const StepError& x, const StepError& y) { return x.clock < y.clock; };
  require(std::is_sorted(got.rows.begin(), got.rows.end(), by_clock), "errors come oldest first");
  const auto in_order = [&](const StepError& x, const StepError& y) { return key(x) < key(y); };
  std::sort(got.rows.begin(), got.rows.end(), in_order);
  StepErrors& expected = batch.reported;
  std::sort(expected.rows.begin(), expected.rows.end(), in_order);
  require(std::equal(got.rows.begin(), got.rows.end(), expected.rows.begin(), expected.rows.end(),
                     [&](const auto& x, const auto& y) { return key(x) == key(y); }),
          "take_errors reports the rows of closed steps");
  require(got.batch == expected.batch, "take_errors reports the batch errors of closed steps");
  expected = {};
  sync();
}

}  // namespace sparse_kvcm::testing
