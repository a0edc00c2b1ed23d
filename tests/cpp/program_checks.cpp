// What the random programs compare after every call.
#include <algorithm>

#include "program_driver.hpp"

namespace sparse_kvcm::testing {

void Program::sync() {
  backend_->settle();
  for (std::int32_t i = 0; i < num_requests(); ++i)
    if (model_.request(i).state != KvCacheState::kClosed)
      require(model_.set_pages(i, caches_[at(i)]->host_pages()),
              "host pages cover the watermark, keep their order and stay within the length");
  poison_what_was_freed();
  require(numbers(manager_->occupancy()) == numbers(model_.occupancy()), "occupancy is exact");
  for (std::int32_t i = 0; i < num_requests(); ++i) compare_request(i);
  for (std::int32_t b = 0; b < model_.num_batches(); ++b) compare_batch(b);
}

void Program::poison_what_was_freed() {
  const std::vector<std::uint8_t> leased = model_.leased_pages();
  const std::vector<std::uint8_t> owned = model_.owned_host_pages();
  for (std::size_t p = 0; p < leased.size(); ++p)
    if (leased_[p] && !leased[p])
      bytes_.poison_slots(static_cast<std::int32_t>(p) * page(), page());
  for (std::size_t p = 0; p < owned.size(); ++p) {
    require(owned[p] <= 1, "a host page belongs to one request");
    if (owned_[p] && !owned[p]) bytes_.poison_host_page(static_cast<std::int32_t>(p));
  }
  leased_ = leased;
  owned_ = owned;
}

void Program::poison_what_is_free() {
  for (std::size_t p = 0; p < leased_.size(); ++p)
    if (!leased_[p]) bytes_.poison_slots(static_cast<std::int32_t>(p) * page(), page());
  for (std::size_t p = 0; p < owned_.size(); ++p)
    if (!owned_[p]) bytes_.poison_host_page(static_cast<std::int32_t>(p));
}

void Program::compare_request(std::int32_t i) {
  if (caches_[at(i)] == nullptr) return;
  const KvCache& cache = *caches_[at(i)];
  const ModelRequest& r = model_.request(i);
  require(cache.state() == r.state, "state");
  require(cache.need() == r.need, "need");
  require(cache.row().value_or(kNobody) == r.row, "row");
  if (r.state == KvCacheState::kClosed) return require(!cache.lease(), "closed: no lease");
  require(cache.length() == r.length, "length");
  require(cache.committed_length() == r.committed, "committed_length");
  require(cache.watermark() == r.watermark, "watermark");
  require(cache.lease() == r.lease, "lease");
  if (r.lease) require(cache.window_begin() == r.window_begin, "window_begin");
}

void Program::compare_batch(std::int32_t b) {
  const ModelBatch& model = model_.batch(b);
  if (model.closed) return;
  const Batch& batch = *batches_[at(b)];
  require(batch.clock() == model.clock, "clock counts the publishes");
  require(batch.step_open() == model.step_open, "step_open");
  const std::vector<std::int32_t> dirty = batch.dirty_rows();
  require(std::is_sorted(dirty.begin(), dirty.end()), "dirty rows ascend");
  for (std::int32_t row = 0; row < model.options.max_rows; ++row)
    require(model.touched[at(row)] || std::count(dirty.begin(), dirty.end(), row) == 0,
            "a row that no call changed is not dirty");
}

void Program::check_device_rows(std::int32_t b) {
  const ModelBatch& model = model_.batch(b);
  const Batch& batch = *batches_[at(b)];
  for (std::int32_t row = 0; row < model.options.max_rows; ++row) {
    const RowState& state = batch.row_states_address()[row];
    const DeviceRow& device = model.device[at(row)];
    if (device.request == kNobody) {
      require(state.lease_id < 0, "an empty row is unseated on the device");
      continue;
    }
    require(state == device.state, "row state on the device");
    const ModelRequest& r = model_.request(device.request);
    require(static_cast<std::int64_t>(r.pages.size()) <= batch.max_pages(), "max_pages");
    const std::int32_t* table = batch.page_table_address() + row * batch.max_pages();
    require(std::equal(table, table + model_.pages_for(r.watermark), r.pages.begin()),
            "page table on the device");
    count_if(r.watermark < r.committed, Situation::kLateFlush);
    const bool cannot = r.watermark == r.committed || model_.free_pages() == 0;
    require(cannot, "publish raises the watermark as far as host pages can be had");
    check_history(r);
    for (std::int32_t o = r.committed; o < r.length; ++o) bytes_.poison_slots(r.ring_slot(o), 1);
  }
}

void Program::check_lease(std::int32_t i) {
  const ModelRequest& r = model_.request(i);
  const std::optional<Lease> lease = caches_[at(i)]->lease();
  require(lease.has_value(), "an active request has a lease");
  require(lease->cached_slots == r.cached_slots && lease->window_slots == r.window_slots,
          "a lease has N cached slots and W of window, or is all window");
  require(lease->base >= 0 && lease->base % page() == 0, "a lease begins with a page");
  require(lease->base + lease->num_slots() <= manager_->trash_slot(), "a lease is in the arena");
  bool again = false;
  for (std::int32_t p = lease->base / page(); p < (lease->base + lease->num_slots()) / page();
       ++p) {
    require(!leased_[at(p)], "leases do not overlap");
    again |= once_leased_[at(p)] != 0;
    once_leased_[at(p)] = 1;
  }
  count_if(again, Situation::kRelease);
  require(lease->id >= 0 && lease->id < manager_->config().max_leases, "lease id");
  for (const ModelRequest& other : model_.requests())
    require(!other.holds_memory || !other.lease || other.lease->id != lease->id,
            "a lease id is used once at a time");
  require(std::count(generations_.begin(), generations_.end(), lease->generation) == 0,
          "a generation is never used twice");
  generations_.push_back(lease->generation);
  for (std::int32_t group = 0; group < model_.num_groups(); ++group) {
    const auto entries = caches_[at(i)]->decode_entries(group);
    require(entries == std::vector<DecodedEntry>(at(r.cached_slots)), "a new lease is empty");
  }
}

Residents Program::residents(std::int32_t request, std::int32_t group) {
  Residents found;
  if (request == kNobody) return found;
  const ModelRequest& r = model_.request(request);
  if (r.state != KvCacheState::kActive) return found;
  const std::vector<DecodedEntry> entries = caches_[at(request)]->decode_entries(group);
  require(entries.size() == at(r.cached_slots), "one entry per cached slot");
  for (std::size_t n = 0; n < entries.size(); ++n)
    if (!entries[n].empty)
      require(
          found.emplace(entries[n].ordinal, r.lease->base + static_cast<std::int32_t>(n)).second,
          "a unit has one entry");
  return found;
}

void Program::check_ring(const ModelRequest& r, std::int32_t end) {
  for (std::int32_t o = r.window_begin; o < end; ++o)
    for (std::int32_t group = 0; group < model_.num_groups(); ++group)
      require(bytes_.group_holds(group, r.ring_slot(o), r.tag(o)), "the window holds its units");
}

void Program::check_history(const ModelRequest& r) {
  for (std::int32_t o = 0; o < r.watermark; ++o)
    for (std::int32_t group = 0; group < model_.num_groups(); ++group)
      require(bytes_.host_holds(group, r.pages[at(o / page())], o % page(), r.tag(o)),
              "host history holds the units below the watermark");
}

void Program::check_entries(const ModelRequest& r) {
  for (std::int32_t group = 0; group < model_.num_groups(); ++group)
    for (const auto& [ordinal, slot] : residents(r.id, group)) {
      require(ordinal >= 0 && ordinal < r.watermark, "a cached unit is in host history");
      require(bytes_.group_holds(group, slot, r.tag(ordinal)), "a cached unit lies in its slot");
    }
}

// Slots of the ring that the window does not cover may hold anything.
void Program::poison_unreadable(const ModelRequest& r) {
  const std::int32_t ring = r.lease->base + r.cached_slots;
  std::vector<std::uint8_t> readable(at(r.window_slots), 0);
  for (std::int32_t o = r.window_begin; o < r.committed; ++o)
    readable[at(r.ring_slot(o) - ring)] = 1;
  for (std::int32_t n = 0; n < r.window_slots; ++n)
    if (!readable[at(n)]) bytes_.poison_slots(ring + n, 1);
}

void Program::check_everything() {
  for (const ModelRequest& r : model_.requests()) {
    if (r.state == KvCacheState::kClosed) continue;
    check_history(r);
    if (!r.lease) continue;
    check_ring(r, r.committed);
    if (r.step_batch == kNobody) check_entries(r);
  }
  for (std::int32_t b = 0; b < model_.num_batches(); ++b)
    if (!model_.batch(b).closed && random_.percent(50)) take_errors(b);
}

// In any order nothing leaks, and nothing wrote where it had no business.
void Program::close_everything() {
  std::vector<std::int32_t> order;
  for (std::int32_t i = 0; i < num_requests(); ++i) order.push_back(i);
  for (std::int32_t b = 0; b < model_.num_batches(); ++b) order.push_back(-1 - b);
  random_.shuffle(order);
  for (const std::int32_t which : order) {
    if (which >= 0 && caches_[at(which)] != nullptr) close_request(which);
    if (which < 0 && batches_[at(-1 - which)] != nullptr) {
      batches_[at(-1 - which)].reset();
      model_.close_batch(-1 - which);
      sync();
    }
  }
  require(numbers(manager_->occupancy()) == fresh_occupancy_, "everything is free at the end");
  require(bytes_.slots_are_poison(0, manager_->trash_slot()), "nobody writes to free slots");
  for (std::int32_t p = 0; p < manager_->config().host_pages; ++p)
    require(bytes_.host_page_is_poison(p), "nobody writes to free host pages");
}

}  // namespace sparse_kvcm::testing
