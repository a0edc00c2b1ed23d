#include "program_model.hpp"

#include <algorithm>

namespace sparse_kvcm::testing {

UnitTag ModelRequest::tag(std::int32_t ordinal) const {
  return {static_cast<std::uint32_t>(id), ordinal, versions[static_cast<std::size_t>(ordinal)]};
}

std::int32_t ModelRequest::ring_slot(std::int32_t ordinal) const {
  return lease->base + cached_slots + ordinal % window_slots;
}

std::size_t Model::cell(std::int32_t row, std::int32_t group) const {
  return at(row) * config_.groups.size() + at(group);
}

std::int32_t Model::pages_for(std::int32_t units) const {
  const std::int32_t page = config_.units_per_page();
  return (units + page - 1) / page;
}

void Model::touch(std::int32_t i) {
  const ModelRequest& r = requests_[at(i)];
  if (r.batch != kNobody) batches_[at(r.batch)].touched[at(r.row)] = 1;
}

// --- requests ------------------------------------------------------------------------------------

Refusals Model::refuses_create(const KvCacheOptions& options) const {
  const std::int32_t page = config_.units_per_page();
  if (options.need < 1 || options.need > kMaxUnits) return kArgument;
  const std::int32_t n = options.cached_slots == -1 ? config_.cached_slots : options.cached_slots;
  if (n < 0 || n > kMaxCachedSlots || n % page != 0) return kArgument;
  const bool all_window = options.need <= n + config_.window_slots;
  for (const SelectionGroupConfig& group : config_.groups)
    if (!all_window && n < group.top_k) return kArgument;
  const std::int64_t slots = all_window ? std::int64_t{pages_for(options.need)} * page
                                        : std::int64_t{n} + config_.window_slots;
  return slots > config_.arena_pages * page ? kArgument : kNone;
}

std::int32_t Model::create(const KvCacheOptions& options) {
  ModelRequest r;
  r.id = static_cast<std::int32_t>(requests_.size());
  r.need = options.need;
  r.cached_slots = options.cached_slots == -1 ? config_.cached_slots : options.cached_slots;
  r.window_slots = config_.window_slots;
  if (r.need <= r.cached_slots + r.window_slots) {
    r.cached_slots = 0;
    r.window_slots = pages_for(r.need) * config_.units_per_page();
  }
  r.versions.resize(at(r.need));
  requests_.push_back(std::move(r));
  return requests_.back().id;
}

Refusals Model::refuses_resume(std::int32_t i) const {
  return requests_[at(i)].state == KvCacheState::kClosed ? kState : kNone;
}

bool Model::has_room_for(std::int32_t i) const {
  const ModelRequest& r = requests_[at(i)];
  const Occupancy now = occupancy();
  return r.state == KvCacheState::kActive ||
         (now.free_leases > 0 && now.largest_free_arena_run >= r.cached_slots + r.window_slots);
}

void Model::resume(std::int32_t i, const Lease& lease) {
  ModelRequest& r = requests_[at(i)];
  r.state = KvCacheState::kActive;
  r.lease = lease;
  r.window_begin = r.all_window() ? 0 : r.committed;
}

Refusals Model::refuses_suspend(std::int32_t i) const {
  const ModelRequest& r = requests_[at(i)];
  if (r.state == KvCacheState::kClosed) return kState;
  if (r.state == KvCacheState::kSuspended) return kNone;
  Refusals refusals = kNone;
  if (r.step_batch != kNobody) refusals |= kState;
  const std::int64_t have = static_cast<std::int64_t>(r.pages.size()) + free_pages();
  if (pages_for(r.committed) > have) refusals |= kPages;
  return refusals;
}

void Model::suspend(std::int32_t i) {
  ModelRequest& r = requests_[at(i)];
  if (r.state == KvCacheState::kSuspended) return;
  if (r.batch != kNobody) remove(i);
  r.state = KvCacheState::kSuspended;
  r.length = r.watermark = r.committed;
  r.lease.reset();
}

Refusals Model::refuses_import(std::int32_t i, std::int32_t num_units) const {
  const ModelRequest& r = requests_[at(i)];
  if (r.state == KvCacheState::kClosed) return kState;
  Refusals refusals = kNone;
  if (r.step_batch != kNobody || r.length > r.committed || r.watermark < r.committed)
    refusals |= kState;
  if (num_units < 0 || num_units > r.need - r.committed) refusals |= kArgument;
  const std::int64_t have = static_cast<std::int64_t>(r.pages.size()) + free_pages();
  if (refusals == kNone && pages_for(r.committed + num_units) > have) refusals |= kPages;
  return refusals;
}

void Model::import_history(std::int32_t i, std::int32_t num_units) {
  ModelRequest& r = requests_[at(i)];
  r.committed += num_units;
  r.length = r.watermark = r.committed;
  if (r.state == KvCacheState::kActive) r.window_begin = r.all_window() ? 0 : r.committed;
  touch(i);
}

void Model::close(std::int32_t i) {
  ModelRequest& r = requests_[at(i)];
  if (r.state == KvCacheState::kClosed) return;
  if (r.batch != kNobody) remove(i);
  r.state = KvCacheState::kClosed;
  r.holds_memory = r.step_batch != kNobody;
}

// --- seats ---------------------------------------------------------------------------------------

std::int32_t Model::create_batch(const BatchOptions& options, std::uint32_t clock) {
  ModelBatch b;
  b.options = options;
  b.clock = clock;
  const std::size_t rows = at(options.max_rows);
  b.seats.assign(rows, kNobody);
  b.device.resize(rows);
  b.touched.assign(rows, 1);  // nothing has been uploaded yet
  b.resolved.assign(rows * config_.groups.size(), 0);
  b.errors.assign(rows * config_.groups.size(), 0);
  batches_.push_back(std::move(b));
  return num_batches() - 1;
}

std::int32_t Model::first_free_row(std::int32_t b) const {
  const auto& seats = batches_[at(b)].seats;
  const auto found = std::find(seats.begin(), seats.end(), kNobody);
  return found == seats.end() ? kNobody : static_cast<std::int32_t>(found - seats.begin());
}

Refusals Model::refuses_add(std::int32_t b, std::int32_t i, std::optional<std::int32_t> row) const {
  const ModelBatch& batch = batches_[at(b)];
  const ModelRequest& r = requests_[at(i)];
  if (batch.closed) return kState;
  Refusals refusals = kNone;
  if (r.state != KvCacheState::kActive) refusals |= kState;
  if (r.batch != kNobody && r.batch != b) refusals |= kState;
  // In the open step of a Batch that it has left: a second step would change what that one commits.
  if (r.step_batch != kNobody && r.step_batch != b) refusals |= kState;
  if (r.need > batch.options.max_units) refusals |= kArgument;
  if (r.batch == b) return row && *row != r.row ? kArgument | kState : refusals;
  if (!row) return first_free_row(b) == kNobody ? refusals | kState : refusals;
  if (*row < 0 || *row >= batch.options.max_rows || batch.seats[at(*row)] != kNobody)
    refusals |= kArgument;
  return refusals;
}

void Model::add(std::int32_t b, std::int32_t i, std::int32_t row) {
  ModelRequest& r = requests_[at(i)];
  r.batch = b;
  r.row = row;
  batches_[at(b)].seats[at(row)] = i;
  touch(i);
}

Refusals Model::refuses_remove(std::int32_t b, std::int32_t i) const {
  return batches_[at(b)].closed || requests_[at(i)].batch != b ? kState : kNone;
}

void Model::remove(std::int32_t i) {
  ModelRequest& r = requests_[at(i)];
  touch(i);
  batches_[at(r.batch)].seats[at(r.row)] = kNobody;
  r.batch = r.row = kNobody;
}

void Model::close_batch(std::int32_t b) {
  ModelBatch& batch = batches_[at(b)];
  if (batch.closed) return;
  if (batch.step_open) abort_step(b);
  for (const std::int32_t i : std::vector<std::int32_t>(batch.seats))
    if (i != kNobody) remove(i);
  batch.closed = true;
}

// --- memory --------------------------------------------------------------------------------------

bool Model::set_pages(std::int32_t i, const std::vector<std::int32_t>& pages) {
  ModelRequest& r = requests_[at(i)];
  const bool keeps_order = std::equal(
      pages.begin(),
      pages.begin() + static_cast<std::ptrdiff_t>(std::min(pages.size(), r.pages.size())),
      r.pages.begin());
  r.pages = pages;
  const auto count = static_cast<std::int32_t>(pages.size());
  return keeps_order && count >= pages_for(r.watermark) && count <= pages_for(r.length);
}

std::int64_t Model::free_pages() const {
  std::int64_t free = config_.host_pages;
  for (const ModelRequest& r : requests_)
    if (r.holds_memory) free -= static_cast<std::int64_t>(r.pages.size());
  return free;
}

std::vector<std::uint8_t> Model::leased_pages() const {
  std::vector<std::uint8_t> leased(static_cast<std::size_t>(config_.arena_pages), 0);
  const std::int32_t page = config_.units_per_page();
  for (const ModelRequest& r : requests_)
    if (r.holds_memory && r.lease)
      std::fill_n(leased.begin() + r.lease->base / page, r.lease->num_slots() / page,
                  std::uint8_t{1});
  return leased;
}

std::vector<std::uint8_t> Model::owned_host_pages() const {
  std::vector<std::uint8_t> owned(static_cast<std::size_t>(config_.host_pages), 0);
  for (const ModelRequest& r : requests_)
    if (r.holds_memory)
      for (const std::int32_t page : r.pages) ++owned[at(page)];
  return owned;
}

Occupancy Model::occupancy() const {
  Occupancy o;
  o.free_host_pages = free_pages();
  o.free_leases = config_.max_leases;
  for (const ModelRequest& r : requests_) o.free_leases -= r.holds_memory && r.lease ? 1 : 0;
  std::int64_t run = 0;
  for (const std::uint8_t leased : leased_pages()) {
    run = leased ? 0 : run + config_.units_per_page();
    o.free_arena_slots += leased ? 0 : config_.units_per_page();
    o.largest_free_arena_run = std::max(o.largest_free_arena_run, run);
  }
  return o;
}

}  // namespace sparse_kvcm::testing
