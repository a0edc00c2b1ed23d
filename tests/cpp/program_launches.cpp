// What the random programs do between wait_ready and record_read: resolve, fetch, write.
#include <algorithm>
#include <limits>
#include <set>

#include "program_driver.hpp"

namespace sparse_kvcm::testing {

// Takes one launch a phase further, or starts another.
void Program::next_of_launches(std::int32_t b) {
  if (model_.batch(b).failed_publish) return;
  auto& launches = launches_[at(b)];
  const auto unfinished = std::find_if(launches.begin(), launches.end(),
                                       [](const Launch& l) { return l.phase != Phase::kWritten; });
  if (unfinished != launches.end() && random_.percent(80))
    return unfinished->phase == Phase::kResolved ? fetch(b, *unfinished) : write(b, *unfinished);
  const std::vector<std::int32_t> todo = groups_to_resolve(b);
  const bool any = todo.empty() || random_.percent(5);
  const std::int32_t group = any ? random_.below(model_.num_groups()) : random_.pick(todo);
  for (Launch& launch : launches)  // the group's outputs are read until its launch is fetched
    if (launch.group == group && launch.phase == Phase::kResolved) return fetch(b, launch);
  resolve(b, group);
}

// Each row once: rows still to be resolved, a few others, padding.
std::vector<std::int32_t> Program::pick_rows(std::int32_t b, std::int32_t group) {
  const ModelBatch& batch = model_.batch(b);
  const std::int32_t max_rows = batch.options.max_rows;
  std::vector<std::int32_t> rows;
  for (std::int32_t row = 0; row < max_rows; ++row) {
    const bool seated = batch.device[at(row)].request != kNobody;
    const bool todo = seated && !batch.resolved[model_.cell(row, group)];
    if (random_.percent(todo ? 85 : seated ? 8 : 4)) rows.push_back(row);
  }
  if (random_.percent(4))
    rows.push_back(random_.pick<std::int32_t>(
        {max_rows, -2, 1 << 20, std::numeric_limits<std::int32_t>::min()}));
  for (std::int32_t n = random_.percent(20) ? random_.below(3) : 0; n > 0; --n)
    rows.push_back(kPaddingRow);
  random_.shuffle(rows);
  if (rows.size() > at(max_rows)) rows.resize(at(max_rows));
  return rows;
}

std::int32_t Program::pick_ordinal(const RowState& state) {
  const std::int32_t dice = random_.below(100);
  if (dice < 8 || state.length == 0) return -1;
  if (dice < 10)
    return random_.pick<std::int32_t>({state.length, state.length + 7, -2, kMaxUnits,
                                       std::numeric_limits<std::int32_t>::max(),
                                       std::numeric_limits<std::int32_t>::min()});
  if (dice < 45) return random_.below(std::min(state.length, 10));  // often: makes hits
  if (dice < 65) return random_.between(std::max(0, state.length - 8), state.length - 1);
  return random_.below(state.length);
}

Launch Program::prepare(std::int32_t b, std::int32_t group) {
  const ModelBatch& batch = model_.batch(b);
  std::pmr::memory_resource* const memory = shared_memory(options_.device);
  Launch launch(memory);
  launch.batch = b;
  launch.group = group;
  launch.k = random_.between(1, manager_->config().groups[at(group)].top_k);
  launch.stride = launch.k + (random_.percent(30) ? random_.below(4) : 0);
  const std::vector<std::int32_t> rows = pick_rows(b, group);
  launch.rows.assign(rows.begin(), rows.end());
  launch.served.assign(launch.rows.size(), 0);
  launch.selection.assign(launch.rows.size() * static_cast<std::size_t>(launch.stride), 3);
  for (std::int32_t i = 0; i < launch.b(); ++i) {
    const std::int32_t row = launch.rows[at(i)];
    const bool known = row >= 0 && row < batch.options.max_rows;
    const RowState state = known ? batch.device[at(row)].state : RowState{};
    for (std::int32_t j = 0; j < launch.k; ++j) {
      std::int32_t& cell = launch.selection[static_cast<std::size_t>(i * launch.stride + j)];
      cell = j > 0 && random_.percent(10) ? launch.selected(i, j - 1) : pick_ordinal(state);
    }
  }
  const std::uint32_t own =
      random_.percent(70) ? 0 : static_cast<std::uint32_t>(random_.below(128));
  count_if(own != 0, Situation::kOwnOutputs);
  const ResolveOutputs defaults = batch.closed ? ResolveOutputs{} : batches_[at(b)]->outputs(group);
  launch.outputs =
      std::make_shared<LaunchOutputs>(defaults, batch.closed ? 127 : own, launch.b(), launch.k,
                                      manager_->config().max_new_units, memory);
  return launch;
}

void Program::resolve(std::int32_t b, std::int32_t group) {
  ModelBatch& batch = model_.batch(b);
  Launch launch = prepare(b, group);
  std::vector<Residents> before(launch.rows.size());
  for (std::int32_t i = 0; i < launch.b(); ++i) {
    const std::int32_t row = launch.rows[at(i)];
    trace("  row", row);
    for (std::int32_t j = 0; j < launch.k; ++j) trace("    selects", launch.selected(i, j));
    if (row >= 0 && row < batch.options.max_rows)
      before[at(i)] = residents(batch.device[at(row)].request, group);
  }
  trace("resolve batch", b, "group", group, "k", launch.k, "b", launch.b());
  if (batch.device_open && random_.below(200) == 0) backend_->fail_after(0);
  const Outcome outcome = outcome_of("resolve", batch.closed ? kState : kNone, [&] {
    batches_[at(b)]->resolve(group, launch.rows.data(), launch.b(), launch.selection.data(),
                             launch.k, launch.stride, launch.outputs->argument(), 0);
  });
  backend_->withdraw();
  if (outcome == Outcome::kFailed) return abort_step(b);
  if (outcome == Outcome::kRefused) return;
  const ResolveOutputs& out = launch.outputs->all();
  launch.slots.assign(out.slots, out.slots + launch.b() * launch.k);
  launch.write_slots.assign(out.write_slots,
                            out.write_slots + launch.b() * manager_->config().max_new_units);
  for (std::int32_t i = 0; i < launch.b(); ++i) expect_row(b, launch, i, before[at(i)]);
  sync();
  if (!batch.step_open) return;
  for (const Launch& other : launches_[at(b)])
    count_if(other.group == group, Situation::kSeveralLaunchesPerGroup);
  launches_[at(b)].push_back(std::move(launch));
}

void Program::expect_row(std::int32_t b, Launch& launch, std::int32_t i, const Residents& before) {
  ModelBatch& batch = model_.batch(b);
  const std::int32_t row = launch.rows[at(i)];
  if (row == kPaddingRow) {
    count(Situation::kPadding);
    return expect_blank(batch, launch, i, 0);
  }
  if (row < 0 || row >= batch.options.max_rows || batch.device[at(row)].request == kNobody) {
    count(Situation::kInvalidRow);
    batch.batch_error |= kBatchErrorRow;
    return expect_blank(batch, launch, i, 0);
  }
  const std::size_t cell = model_.cell(row, launch.group);
  if (!batch.device_open || batch.resolved[cell]) {
    count(batch.device_open ? Situation::kStaleTwice : Situation::kStaleClosed);
    batch.errors[cell] |= kErrorStale;
    require(residents(batch.device[at(row)].request, launch.group) == before,
            "a stale row leaves the entries as they are");
    return expect_blank(batch, launch, i, kErrorStale);
  }
  batch.resolved[cell] = 1;
  launch.served[at(i)] = 1;
  expect_selected(b, launch, i, before);
}

void Program::expect_blank(const ModelBatch& batch, const Launch& launch, std::int32_t i,
                           std::uint32_t error) {
  const ResolveOutputs& out = launch.outputs->all();
  const std::int32_t columns = manager_->config().max_new_units;
  for (std::int32_t j = 0; j < launch.k; ++j)
    require(launch.slot(i, j) == kNoSlot, "a row that is not served gives slots -1");
  for (std::int32_t j = 0; j < columns; ++j)
    require(out.write_slots[i * columns + j] == batch.options.no_write_slot,
            "a row that is not served gives no write slots");
  require(out.miss_counts[i] == 0 && out.hit_counts[i] == 0, "a row that is not served counts 0");
  require(out.errors[i] == error, "error word of a row that is not served");
}

void Program::expect_selected(std::int32_t b, Launch& launch, std::int32_t i,
                              const Residents& before) {
  ModelBatch& batch = model_.batch(b);
  const ResolveOutputs& out = launch.outputs->all();
  const DeviceRow& device = batch.device[at(launch.rows[at(i)])];
  const RowState& state = device.state;
  const ModelRequest& r = model_.request(device.request);
  std::uint32_t error = 0;
  Residents chosen;
  for (std::int32_t j = 0; j < launch.k; ++j) {
    const std::int32_t o = launch.selected(i, j);
    const std::int32_t slot = launch.slot(i, j);
    if (o < 0 || o >= state.length) {
      require(slot == kNoSlot, "an ordinal that is -1 or out of range gives -1");
      error |= o == -1 ? 0 : static_cast<std::uint32_t>(kErrorRange);
    } else if (o >= state.window_begin) {
      require(slot == r.ring_slot(o), "a window ordinal gives its slot of the ring");
      count_if(!r.all_window(), Situation::kWindowRead);
      count_if(!r.all_window() && o < state.watermark, Situation::kWindowReadBelowWatermark);
    } else {
      require(slot >= state.base && slot < state.base + state.cached_slots,
              "a cached ordinal gives a cached slot");
      const auto [at_slot, is_new] = chosen.emplace(o, slot);
      require(at_slot->second == slot, "duplicates share one slot");
      count_if(!is_new, Situation::kDuplicate);
    }
  }
  expect_misses(out, launch, i, chosen, before);
  count_if((error & kErrorRange) != 0, Situation::kOutOfRange);
  require(out.errors[i] == error, "error word of a served row");
  batch.errors[model_.cell(launch.rows[at(i)], launch.group)] |= error;
  const std::int32_t columns = manager_->config().max_new_units;
  for (std::int32_t j = 0; j < columns; ++j)
    require(out.write_slots[i * columns + j] == (j < state.length - state.committed
                                                     ? r.ring_slot(state.committed + j)
                                                     : batch.options.no_write_slot),
            "write slots are the ring slots of the new units");
  if (r.state == KvCacheState::kClosed) return;
  const std::vector<DecodedEntry> after = caches_[at(r.id)]->decode_entries(launch.group);
  for (const auto& [o, slot] : chosen) {
    const DecodedEntry expected{false, batch.clock & kStampMask, before.contains(o), o};
    require(after[at(slot - state.base)] == expected,
            "a selected unit's entry has the clock, whether it was resident, and the ordinal");
  }
}

void Program::expect_misses(const ResolveOutputs& out, const Launch& launch, std::int32_t i,
                            const Residents& chosen, const Residents& before) {
  std::set<std::int32_t> slots;
  std::vector<std::pair<std::int32_t, std::int32_t>> misses;
  for (const auto& [o, slot] : chosen) {
    require(slots.insert(slot).second, "distinct units get distinct slots");
    const auto hit = before.find(o);
    if (hit == before.end())
      misses.emplace_back(o, slot);
    else
      require(hit->second == slot, "a hit keeps its slot");
  }
  const auto num_misses = static_cast<std::int32_t>(misses.size());
  const DeviceRow& device = model_.batch(launch.batch).device[at(launch.rows[at(i)])];
  if (model_.request(device.request).state == KvCacheState::kClosed) {  // entries not to be seen
    require(out.miss_counts[i] + out.hit_counts[i] == static_cast<std::int32_t>(chosen.size()),
            "hits and misses are counted once per distinct unit");
    return;
  }
  require(out.miss_counts[i] == num_misses, "misses are counted once per distinct unit");
  require(out.hit_counts[i] == static_cast<std::int32_t>(chosen.size()) - num_misses,
          "cached hits are counted once per distinct unit");
  for (std::int32_t m = 0; m < num_misses; ++m)
    require(out.miss_ordinals[i * launch.k + m] == misses[at(m)].first &&
                out.miss_slots[i * launch.k + m] == misses[at(m)].second,
            "misses are listed by ascending ordinal, with their slots");
  count_if(num_misses > 0, Situation::kMiss);
  count_if(out.hit_counts[i] > 0, Situation::kHit);
}

}  // namespace sparse_kvcm::testing
