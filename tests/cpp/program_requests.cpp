// Calls of the random programs that take no part in a step: requests and seats.
#include "program_driver.hpp"

namespace sparse_kvcm::testing {

void Program::make_batch() {
  BatchOptions options;
  options.max_rows = random_.between(1, 4);
  options.max_units = random_.between(56, 64);
  if (random_.percent(40)) options.no_write_slot = manager_->trash_slot();
  trace("create_batch max_rows", options.max_rows, "max_units", options.max_units);
  batches_.push_back(manager_->create_batch(options));
  model_.create_batch(options, batches_.back()->clock());
  launches_.emplace_back();
  sync();
}

// A request with a history, seated: what most programs need several of.
void Program::admit() {
  const std::int32_t i = create_request();
  if (i == kNobody) return;
  if (random_.percent(85)) import_history(i);
  if (random_.percent(95)) resume(i);
  if (random_.percent(95)) add(pick_batch(), i);
}

std::int32_t Program::create_request() {
  const KvCacheManagerConfig& config = manager_->config();
  KvCacheOptions options;
  const std::int32_t small = config.cached_slots + config.window_slots;
  options.need = random_.percent(25) ? random_.between(1, small) : random_.between(small, 60);
  if (random_.percent(25)) options.cached_slots = page() * random_.between(0, 16 / page());
  trace("create_kv_cache", caches_.size(), "need", options.need, "cached_slots",
        options.cached_slots);
  KvCachePtr cache;
  if (!accepted("create_kv_cache", model_.refuses_create(options),
                [&] { cache = manager_->create_kv_cache(options); }))
    return kNobody;
  caches_.push_back(cache);
  const std::int32_t i = model_.create(options);
  sync();
  return i;
}

void Program::import_history(std::int32_t i) {
  ModelRequest& r = model_.request(i);
  const std::int32_t room = r.need - r.committed;
  const std::int32_t num_units = random_.percent(95) ? random_.between(1, std::max(1, room * 2 / 3))
                                                     : random_.pick<std::int32_t>({-1, room + 1});
  trace("import_history", i, "units", num_units);
  const std::uint32_t version = ++version_;
  std::vector<UnitTag> tags;
  for (std::int32_t o = r.committed; o < std::min(r.need, r.committed + num_units); ++o)
    tags.push_back({static_cast<std::uint32_t>(i), o, version});
  std::vector<std::vector<std::byte>> rows;
  std::vector<UnitRows> layers;
  for (std::int32_t layer = 0; layer < bytes_.num_layers(); ++layer) {
    const std::int32_t padding = random_.pick<std::int32_t>({0, 0, 4, 24});
    rows.push_back(bytes_.rows(layer, tags, padding));
    rows.back().resize(rows.back().size() + 64);  // never null
    layers.push_back({rows.back().data(), bytes_.unit_bytes(layer) + padding});
  }
  const Refusals refusals = model_.refuses_import(i, num_units);
  count_if((refusals & kPages) != 0, Situation::kImportOutOfPages);
  if (!accepted_at_last("import_history", refusals,
                        [&] { caches_[at(i)]->import_history(layers, num_units, 0); }))
    return;
  for (const UnitTag& tag : tags) r.versions[at(tag.ordinal)] = version;
  model_.import_history(i, num_units);
  count(r.lease ? Situation::kImportWhileActive : Situation::kImport);
  sync();
  check_history(r);
  if (!r.lease) return;
  if (r.all_window()) check_ring(r, r.committed);
  poison_unreadable(r);
}

void Program::resume(std::int32_t i) {
  ModelRequest& r = model_.request(i);
  const bool was_active = r.state == KvCacheState::kActive;
  const bool room = model_.has_room_for(i);
  trace("resume", i);
  bool resumed = false;
  std::optional<Snapshot> before;
  if (!room) before = snapshot();
  if (!accepted_at_last("resume", model_.refuses_resume(i),
                        [&] { resumed = caches_[at(i)]->resume(0); }))
    return;
  require(resumed == room, "resume answers whether the arena and the lease ids have room");
  if (!room) {
    require(first_difference(*before, snapshot()).empty(), "a resume without room changes nothing");
    count(Situation::kResumeRefused);
  }
  if (!room || was_active) return sync();
  check_lease(i);
  model_.resume(i, *caches_[at(i)]->lease());
  count_if(r.all_window(), Situation::kAllWindow);
  sync();
  check_ring(r, r.committed);
}

void Program::suspend(std::int32_t i) {
  ModelRequest& r = model_.request(i);
  const Refusals refusals = model_.refuses_suspend(i);
  trace("suspend", i);
  count_if((refusals & kState) != 0 && r.step_batch != kNobody, Situation::kSuspendRefusedInStep);
  count_if(refusals == kPages, Situation::kSuspendOutOfPages);
  if (!accepted_at_last("suspend", refusals, [&] { caches_[at(i)]->suspend(0); })) return;
  count_if(r.watermark < r.committed, Situation::kSuspendWithWindow);
  model_.suspend(i);
  sync();
  check_history(r);
}

void Program::close_request(std::int32_t i) {
  count_if(model_.request(i).step_batch != kNobody, Situation::kCloseInStep);
  if (random_.percent(50)) {
    trace("close", i);
    caches_[at(i)]->close();
  } else {
    trace("drop", i);
    caches_[at(i)].reset();
  }
  model_.close(i);
  sync();
}

void Program::add(std::int32_t b, std::int32_t i) {
  ModelRequest& r = model_.request(i);
  ModelBatch& batch = model_.batch(b);
  std::optional<std::int32_t> row;
  if (random_.percent(25)) row = random_.between(-1, batch.options.max_rows);
  if (row && r.batch == b && r.row == *row) row.reset();
  trace("add batch", b, "request", i, "row", row.value_or(-9));
  const Refusals refusals = model_.refuses_add(b, i, row);
  std::int32_t got = kNobody;
  if (!accepted("add", refusals, [&] {
        got = row ? batches_[at(b)]->add(*caches_[at(i)], *row)
                  : batches_[at(b)]->add(*caches_[at(i)]);
      }))
    return;
  if (r.batch == b) {
    require(got == r.row, "adding a request again returns its row");
    return sync();
  }
  require(got == row.value_or(model_.first_free_row(b)),
          "add returns the first free row, or `row`");
  count_if(batch.step_open, Situation::kAddInStep);
  count_if(r.seated_before != kNobody && r.seated_before != b, Situation::kMoveToOtherBatch);
  r.seated_before = b;
  model_.add(b, i, got);
  sync();
}

void Program::remove(std::int32_t b, std::int32_t i) {
  if (model_.request(i).batch != kNobody && random_.percent(90)) b = model_.request(i).batch;
  trace("remove batch", b, "request", i);
  if (!accepted("remove", model_.refuses_remove(b, i),
                [&] { batches_[at(b)]->remove(*caches_[at(i)]); }))
    return;
  count_if(model_.request(i).step_batch == b, Situation::kRemoveInStep);
  model_.remove(i);
  sync();
}

void Program::close_batch(std::int32_t b) {
  ModelBatch& batch = model_.batch(b);
  if (!batch.step_open && random_.percent(50)) return;
  trace("close batch", b);
  const bool in_step = batch.step_open;
  const std::vector<DeviceRow> rows = batch.device;
  if (random_.percent(20)) backend_->fail_after(random_.below(6));
  if (random_.percent(50))
    batches_[at(b)]->close();
  else
    batches_[at(b)].reset();
  backend_->withdraw();
  model_.close_batch(b);
  launches_[at(b)].clear();
  sync();
  count_if(in_step, Situation::kBatchClosedInStep);
  if (in_step) after_step(rows, Situation::kAbort);
}

}  // namespace sparse_kvcm::testing
