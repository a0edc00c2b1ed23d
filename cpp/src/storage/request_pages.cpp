// A resize is planned as a list of changes, then committed. Everything that can fail comes before
// the first change that another request could see.
//
// Slots that a layer group gives up go to what it takes first: same stream, so nothing has to wait.
#include "sparse_kvcm/request_pages.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

#include "core/check.hpp"
#include "core/rounding.hpp"
#include "storage/request_pages_plan.hpp"
#include "storage/storage_state.hpp"

namespace sparse_kvcm {

RequestPages::RequestPages(std::shared_ptr<StorageState> storage, std::int32_t expected_length,
                           PageScope scope)
    : storage_(std::move(storage)),
      tables_(storage_->layout.layer_groups().size()),
      counters_(tables_.size()),
      expected_length_(expected_length),
      scope_(scope),
      scratch_reuse_(storage_->layout.config().swa_scratch_reuse.has_value()) {}

RequestPages::~RequestPages() { close(); }

std::unique_lock<std::mutex> RequestPages::lock() const { return storage_->lock_unless_owned(); }

std::int32_t RequestPages::capacity() const {
  const auto held = lock();
  return capacity_;
}

std::int32_t RequestPages::history_length() const {
  const auto held = lock();
  return history_length_;
}

void RequestPages::check_usable(const char* function, Stream stream) const {
  if (closed_) fail_state(function, "the request is closed");
  if (storage_->backend->is_capturing(stream)) fail_state(function, "the stream is capturing");
}

void RequestPages::check_resize(std::int32_t capacity, std::int32_t history_length, Stream stream,
                                StepAtHand step) const {
  constexpr const char* kFunction = "RequestPages.resize";
  check_usable(kFunction, stream);
  if (suspended_) fail_state(kFunction, "the request is suspended; resume it first");
  if (history_length < history_length_ || history_length > capacity) {
    fail_argument(kFunction, "history_length must be in [", history_length_,
                  ", capacity], where it was and what there is room for, got ", history_length,
                  " with a capacity of ", capacity);
  }
  const std::int32_t pages = ceil_div(capacity, storage_->layout.config().tokens_per_block);
  for (const Table& table : tables_) {
    if (table.buffer.empty() || std::cmp_greater_equal(table.buffer.size(), pages)) continue;
    fail_argument(kFunction, "capacity must fit an index buffer of ", table.buffer.size(),
                  " pages, got ", capacity, ", ", pages, " pages");
  }
  if (!any_scratch()) return;
  if (step == StepAtHand::kRedone && history_length == history_length_) return;
  const std::int32_t rewind = storage_->layout.config().swa_scratch_reuse->max_rewind_len;
  const std::int32_t least = std::max(0, capacity_ - rewind);
  if (history_length < least || history_length > capacity_) {
    fail_argument(kFunction, "history_length must be in [", least, ", ", capacity_,
                  "], the step at hand less max_rewind_len, while pages are in scratch, got ",
                  history_length);
  }
}

bool RequestPages::holds(std::int32_t history_length) const {
  const auto held = lock();
  if (history_length > capacity_) return false;
  if (!any_scratch() || history_length == history_length_) return true;
  return history_length >= capacity_ - storage_->layout.config().swa_scratch_reuse->max_rewind_len;
}

// A layer group whose pool group could not hold the request if it had no other, or -1: asked before
// tables are made for it.
std::int32_t RequestPages::hopeless_group(KvCacheDesc request) const {
  const StorageLayout& layout = storage_->layout;
  const std::int32_t tokens = layout.config().tokens_per_block;
  for (std::int32_t group = 0; std::cmp_less(group, tables_.size()); ++group) {
    if (is_left_out(group)) continue;
    const LifeCycle& life_cycle = layout.layer_groups()[static_cast<std::size_t>(group)].life_cycle;
    std::int32_t pages = ceil_div(request.capacity, tokens) -
                         stale_pages(life_cycle, tokens, request.history_length).size();
    if (scratch_reuse_) pages -= layout.scratch_range(group, request).size();
    const PoolGroup& home = storage_->home(group);
    if (pages > home.num_slots() + home.num_draining()) return group;
  }
  return -1;
}

// Most steps of decoding: the new token falls into a page that is there, and no page leaves a
// window.
bool RequestPages::keeps_tables(KvCacheDesc request) const {
  if (any_scratch()) return false;
  const StorageLayout& layout = storage_->layout;
  const std::int32_t tokens = layout.config().tokens_per_block;
  if (ceil_div(request.capacity, tokens) != ceil_div(capacity_, tokens)) return false;
  for (std::int32_t group = 0; std::cmp_less(group, tables_.size()); ++group) {
    const LifeCycle& life_cycle = layout.layer_groups()[static_cast<std::size_t>(group)].life_cycle;
    if (stale_pages(life_cycle, tokens, request.history_length) !=
        stale_pages(life_cycle, tokens, history_length_)) {
      return false;
    }
    if (scratch_reuse_ && layout.scratch_range(group, request).size() > 0) return false;
  }
  return true;
}

bool RequestPages::resize(std::int32_t capacity, std::int32_t history_length, Stream stream,
                          StepAtHand step) {
  const auto held = lock();
  check_resize(capacity, history_length, stream, step);
  if (!keeps_tables({capacity, history_length}) && !move(capacity, history_length, stream)) {
    return false;
  }
  last_stream_ = stream;
  capacity_ = capacity;
  history_length_ = history_length;
  return true;
}

bool RequestPages::move(std::int32_t capacity, std::int32_t history_length, Stream stream) {
  storage_->settle();
  std::int32_t lacking = hopeless_group({capacity, history_length});
  std::vector<Plan> plans;
  plans.reserve(tables_.size());
  try {
    for (std::int32_t group = 0; lacking < 0 && std::cmp_less(group, tables_.size()); ++group) {
      plans.emplace_back();
      if (!plan_group(group, {capacity, history_length}, plans.back(), stream)) lacking = group;
    }
    if (lacking < 0) commit(plans, capacity, stream);
  } catch (...) {
    undo(plans);
    throw;
  }
  if (lacking < 0) return true;
  undo(plans);
  count(lacking, {0, 0, 1});
  return false;
}

bool RequestPages::plan_group(std::int32_t layer_group, KvCacheDesc request, Plan& plan,
                              Stream stream) {
  if (is_left_out(layer_group)) return true;
  if (!is_sparse(layer_group)) {
    plan = plan_table(layer_group, request);
    return take_slots(layer_group, plan, stream);
  }
  plan.num_pages =
      static_cast<std::int32_t>(tables_[static_cast<std::size_t>(layer_group)].slots.size());
  return grow_sparse(layer_group, request.capacity);
}

// Host pages for the whole capacity, in one run where possible. What was taken shows by the size
// that the plan remembers.
bool RequestPages::grow_sparse(std::int32_t layer_group, std::int32_t capacity) {
  const std::int32_t tokens = storage_->layout.config().tokens_per_block;
  const std::int32_t pages = ceil_div(capacity, tokens);
  PoolGroup& home = storage_->home(layer_group);
  home.refresh();
  return home.pages().grow(tables_[static_cast<std::size_t>(layer_group)].slots, pages,
                           std::max(pages, ceil_div(expected_length_, tokens)));
}

void RequestPages::commit(std::vector<Plan>& plans, std::int32_t capacity, Stream stream) {
  const bool any = std::ranges::any_of(plans, [](const Plan& plan) { return !plan.given.empty(); });
  const EventPtr ready = any ? storage_->backend->record(stream) : nullptr;
  const std::int32_t pages = ceil_div(capacity, storage_->layout.config().tokens_per_block);
  for (std::size_t g = 0; g < plans.size(); ++g) {
    const auto group = static_cast<std::int32_t>(g);
    Table& table = tables_[g];
    Plan& plan = plans[g];
    if (is_left_out(group)) continue;
    if (is_sparse(group)) {
      const std::int32_t before = plan.num_pages;
      storage_->home(group).pages().shrink(table.slots, pages);
      for (std::int32_t page = std::min(before, pages); page < std::max(before, pages); ++page) {
        set_entry(table, page, page < pages ? table.slots[static_cast<std::size_t>(page)] : -1);
      }
      count(group, {std::max(0, pages - before), std::max(0, before - pages), 0});
      continue;
    }
    apply(table, plan);
    for (const std::int32_t slot : plan.given) storage_->home(group).slots().release({slot, ready});
    count(group, {std::ssize(plan.taken), std::ssize(plan.given), 0});
  }
}

void RequestPages::apply(Table& table, const Plan& plan) {
  const auto old_pages = static_cast<std::int32_t>(table.slots.size());
  set_size(table, std::max(old_pages, plan.num_pages));
  for (const Plan::Edit& edit : plan.edits) set_entry(table, edit.page, edit.slot);
  set_size(table, plan.num_pages);
  table.scratch = plan.scratch;
  table.scratch_slots = plan.scratch_slots;
}

void RequestPages::set_size(Table& table, std::int32_t pages) {
  table.slots.resize(static_cast<std::size_t>(pages), kBadPageIndex);
}

void RequestPages::set_entry(Table& table, std::int32_t page, std::int32_t slot) {
  const auto index = static_cast<std::size_t>(page);
  if (index < table.slots.size()) table.slots[index] = slot;
  if (index < table.buffer.size()) table.buffer[index] = slot;
  if (track_changes_) table.changes.push_back(page);
}

void RequestPages::undo(std::vector<Plan>& plans) {
  for (std::size_t g = 0; g < plans.size(); ++g) {
    const auto group = static_cast<std::int32_t>(g);
    if (is_left_out(group)) continue;
    PoolGroup& home = storage_->home(group);
    if (is_sparse(group)) home.pages().shrink(tables_[g].slots, plans[g].num_pages);
    for (const Slot& slot : plans[g].taken) home.slots().release(slot);
    plans[g].taken.clear();
  }
}

void RequestPages::drop_step(Stream stream) {
  const auto held = lock();
  check_usable("RequestPages.drop_step", stream);
  if (suspended_) return;
  std::vector<Plan> plans(tables_.size());
  const std::int32_t tokens = storage_->layout.config().tokens_per_block;
  const std::int32_t pages = ceil_div(history_length_, tokens);
  for (std::size_t g = 0; g < plans.size(); ++g) {
    Plan& plan = plans[g];
    const std::vector<std::int32_t>& slots = tables_[g].slots;
    if (is_sparse(static_cast<std::int32_t>(g))) {
      plan.num_pages = static_cast<std::int32_t>(slots.size());
      continue;
    }
    plan.num_pages = std::min(pages, static_cast<std::int32_t>(slots.size()));
    plan.given = tables_[g].scratch_slots;
    for (auto page = static_cast<std::size_t>(plan.num_pages); page < slots.size(); ++page) {
      if (slots[page] != kBadPageIndex) plan.given.push_back(slots[page]);
      plan.edits.push_back({static_cast<std::int32_t>(page), kBadPageIndex, false});
    }
  }
  commit(plans, history_length_, stream);
  last_stream_ = stream;
  capacity_ = history_length_;
}

// NOLINTNEXTLINE(bugprone-exception-escape): only a slot that is not in use is refused.
void RequestPages::close(Stream stream) noexcept {
  const auto held = lock();
  close_on(stream);
}

// NOLINTNEXTLINE(bugprone-exception-escape)
void RequestPages::close() noexcept {
  const auto held = lock();
  close_on(last_stream_);
}

void RequestPages::close_on(Stream stream) {
  if (closed_) return;
  closed_ = true;
  drop_buffers();
  std::vector<SlotOfGroup> given;
  for (std::size_t g = 0; g < tables_.size(); ++g) {
    const auto group = static_cast<std::int32_t>(g);
    if (is_left_out(group)) continue;
    Table table = std::exchange(tables_[g], {});
    count(group, {0, num_slots(table), 0});
    if (is_sparse(group)) {
      storage_->home(group).pages().shrink(table.slots, 0);
      continue;
    }
    for (const auto& slots : {table.slots, table.scratch_slots}) {
      for (const std::int32_t slot : slots) {
        if (slot != kBadPageIndex) given.push_back({group, slot});
      }
    }
    for (const HostPage& page : table.host_pages) {
      storage_->cold_home(group).slots().release({page.slot, host_ready_});
    }
  }
  storage_->give_back(stream, std::move(given));
  capacity_ = 0;
}

std::vector<LayerGroupStatistics> RequestPages::get_and_reset_statistics() {
  const auto held = lock();
  std::vector<LayerGroupStatistics> fresh(counters_.size());
  return std::exchange(counters_, std::move(fresh));
}

void RequestPages::count(std::int32_t layer_group, const LayerGroupStatistics& more) {
  storage_->count(layer_group, more);
  counters_[static_cast<std::size_t>(layer_group)] += more;
}

bool RequestPages::is_sparse(std::int32_t layer_group) const {
  return storage_->layout.layer_groups()[static_cast<std::size_t>(layer_group)]
      .life_cycle.is_sparse;
}

bool RequestPages::is_left_out(std::int32_t layer_group) const {
  return scope_ == PageScope::kDense && is_sparse(layer_group);
}

std::int64_t RequestPages::num_slots(const Table& table) {
  return std::ssize(table.slots) - std::ranges::count(table.slots, kBadPageIndex) +
         std::ssize(table.scratch_slots) + std::ssize(table.host_pages);
}

}  // namespace sparse_kvcm
