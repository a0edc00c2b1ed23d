// A resize is planned in copies of the tables, then committed. Everything that can fail comes before
// the first change that another request could see.
//
// Slots that a layer group gives up go to what it takes first: same stream, so nothing has to wait.
#include "sparse_kvcm/request_pages.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

#include "core/check.hpp"
#include "core/rounding.hpp"
#include "storage/storage_state.hpp"

namespace sparse_kvcm {

// The next state of one layer group's table, and how to get there.
struct RequestPages::Plan {
  Table next;
  std::vector<std::int32_t> given;    // slots that the table no longer has
  std::vector<std::int32_t*> wanted;  // entries of `next` without a slot
  std::vector<Slot> taken;            // from the pool group, for the last of `wanted`
};

RequestPages::RequestPages(std::shared_ptr<StorageState> storage, std::int32_t expected_length)
    : storage_(std::move(storage)),
      tables_(storage_->layout.layer_groups().size()),
      expected_length_(expected_length),
      scratch_reuse_(storage_->layout.config().swa_scratch_reuse.has_value()) {}

RequestPages::~RequestPages() { close(last_stream_); }

void RequestPages::check_resize(std::int32_t capacity, std::int32_t history_length,
                                Stream stream) const {
  constexpr const char* kFunction = "RequestPages.resize";
  if (closed_) fail_state(kFunction, "the request is closed");
  if (storage_->backend->is_capturing(stream)) fail_state(kFunction, "the stream is capturing");
  if (history_length < history_length_ || history_length > capacity) {
    fail_argument(kFunction, "history_length must be in [", history_length_,
                  ", capacity], where it was and what there is room for, got ", history_length,
                  " with a capacity of ", capacity);
  }
  if (!has_scratch_slots()) return;
  const std::int32_t rewind = storage_->layout.config().swa_scratch_reuse->max_rewind_len;
  const std::int32_t least = std::max(0, capacity_ - rewind);
  if (history_length < least || history_length > capacity_) {
    fail_argument(kFunction, "history_length must be in [", least, ", ", capacity_,
                  "], the step at hand less max_rewind_len, while pages are in scratch, got ",
                  history_length);
  }
}

// Which pages stay, go and come in one dense layer group.
RequestPages::Plan RequestPages::plan_table(std::int32_t layer_group, KvCacheDesc request) const {
  const StorageLayout& layout = storage_->layout;
  const std::int32_t tokens = layout.config().tokens_per_block;
  const Table& table = tables_[static_cast<std::size_t>(layer_group)];
  const LifeCycle& life_cycle =
      layout.layer_groups()[static_cast<std::size_t>(layer_group)].life_cycle;
  const PageRange stale = stale_pages(life_cycle, tokens, request.history_length);
  Plan plan;
  if (scratch_reuse_) plan.next.scratch = layout.scratch_range(layer_group, request);
  const auto num_pages = static_cast<std::size_t>(ceil_div(request.capacity, tokens));
  plan.next.slots.assign(num_pages, kBadPageIndex);
  auto keeps = [&](std::int32_t page) {
    return !stale.contains(page) && !plan.next.scratch.contains(page);
  };
  for (std::size_t page = 0; page < std::max(num_pages, table.slots.size()); ++page) {
    const std::int32_t slot = page < table.slots.size() ? table.slots[page] : kBadPageIndex;
    const bool kept = page < num_pages && keeps(static_cast<std::int32_t>(page));
    if (kept) plan.next.slots[page] = slot;
    if (!kept && slot != kBadPageIndex) plan.given.push_back(slot);
    if (kept && slot == kBadPageIndex) plan.wanted.push_back(&plan.next.slots[page]);
  }
  const auto num_scratch =
      static_cast<std::size_t>(layout.scratch_slots(layer_group, plan.next.scratch.size()));
  const std::size_t same = std::min(num_scratch, table.scratch_slots.size());
  const auto kept_end = table.scratch_slots.begin() + static_cast<std::ptrdiff_t>(same);
  plan.next.scratch_slots.assign(table.scratch_slots.begin(), kept_end);
  plan.next.scratch_slots.resize(num_scratch, kBadPageIndex);
  plan.given.insert(plan.given.end(), kept_end, table.scratch_slots.end());
  for (std::size_t i = same; i < num_scratch; ++i) {
    plan.wanted.push_back(&plan.next.scratch_slots[i]);
  }
  return plan;
}

// Fills the entries that want a slot. False if the pool group has too few; the plan then holds what
// it took.
bool RequestPages::take_slots(std::int32_t layer_group, Plan& plan, Stream stream) const {
  PoolGroup& home = storage_->home(layer_group);
  home.refresh();
  auto wanted = plan.wanted.begin();
  std::vector<std::int32_t> left;
  for (const std::int32_t slot : plan.given) {
    if (wanted != plan.wanted.end() && slot < home.slots().target()) {
      **wanted++ = slot;
    } else {
      left.push_back(slot);
    }
  }
  plan.given = std::move(left);
  const auto missing = static_cast<std::int32_t>(plan.wanted.end() - wanted);
  if (!home.slots().allocate(missing, plan.taken)) return false;
  for (const Slot& slot : plan.taken) {
    if (slot.ready) storage_->backend->wait(stream, *slot.ready);
    **wanted++ = slot.id;
  }
  return true;
}

// Whether the pool groups could hold the request if they had no other, before tables are made for
// it.
bool RequestPages::could_fit(KvCacheDesc request) const {
  const StorageLayout& layout = storage_->layout;
  const std::int32_t tokens = layout.config().tokens_per_block;
  for (std::int32_t group = 0; std::cmp_less(group, tables_.size()); ++group) {
    const LifeCycle& life_cycle = layout.layer_groups()[static_cast<std::size_t>(group)].life_cycle;
    std::int32_t pages = ceil_div(request.capacity, tokens) -
                         stale_pages(life_cycle, tokens, request.history_length).size();
    if (scratch_reuse_) pages -= layout.scratch_range(group, request).size();
    const PoolGroup& home = storage_->home(group);
    if (pages > home.num_slots() + home.num_draining()) {
      storage_->count(group, {0, 0, 1});
      return false;
    }
  }
  return true;
}

// Most steps of decoding: the new token falls into a page that is there, and no page leaves a window.
// (What was in scratch is stale now, so a step behind one never keeps its tables.)
bool RequestPages::keeps_tables(KvCacheDesc request) const {
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

bool RequestPages::resize(std::int32_t capacity, std::int32_t history_length, Stream stream) {
  check_resize(capacity, history_length, stream);
  last_stream_ = stream;
  if (!keeps_tables({capacity, history_length}) && !move(capacity, history_length, stream)) {
    return false;
  }
  capacity_ = capacity;
  history_length_ = history_length;
  return true;
}

bool RequestPages::move(std::int32_t capacity, std::int32_t history_length, Stream stream) {
  storage_->settle();
  if (!could_fit({capacity, history_length})) return false;
  std::vector<Plan> plans;
  bool enough = true;
  try {
    for (std::int32_t group = 0; enough && std::cmp_less(group, tables_.size()); ++group) {
      if (is_sparse(group)) {
        plans.emplace_back().next = tables_[static_cast<std::size_t>(group)];
        enough = grow_sparse(group, capacity, plans.back().next);
      } else {
        plans.push_back(plan_table(group, {capacity, history_length}));
        enough = take_slots(group, plans.back(), stream);
      }
      if (!enough) storage_->count(group, {0, 0, 1});
    }
    if (enough) {
      commit(plans, capacity, stream);
    } else {
      undo(plans);
    }
  } catch (...) {
    undo(plans);
    throw;
  }
  return enough;
}

// Host pages for the whole capacity, in one run where possible.
bool RequestPages::grow_sparse(std::int32_t layer_group, std::int32_t capacity, Table& next) const {
  const std::int32_t tokens = storage_->layout.config().tokens_per_block;
  const std::int32_t pages = ceil_div(capacity, tokens);
  PoolGroup& home = storage_->home(layer_group);
  home.refresh();
  return home.pages().grow(next.slots, pages, std::max(pages, ceil_div(expected_length_, tokens)));
}

void RequestPages::commit(std::vector<Plan>& plans, std::int32_t capacity, Stream stream) {
  const bool any = std::ranges::any_of(plans, [](const Plan& plan) { return !plan.given.empty(); });
  const EventPtr ready = any ? storage_->backend->record(stream) : nullptr;
  const std::int32_t pages = ceil_div(capacity, storage_->layout.config().tokens_per_block);
  for (std::size_t g = 0; g < plans.size(); ++g) {
    const auto group = static_cast<std::int32_t>(g);
    const std::int64_t before = num_slots(tables_[g]);
    std::int64_t returned = std::ssize(plans[g].given);
    tables_[g] = std::move(plans[g].next);
    if (is_sparse(group)) {
      storage_->home(group).pages().shrink(tables_[g].slots, pages);
      returned = std::max<std::int64_t>(0, before - pages);
    }
    for (const std::int32_t slot : plans[g].given) {
      storage_->home(group).slots().release({slot, ready});
    }
    storage_->count(group, {num_slots(tables_[g]) - before + returned, returned, 0});
  }
}

void RequestPages::undo(std::vector<Plan>& plans) {
  for (std::size_t g = 0; g < plans.size(); ++g) {
    PoolGroup& home = storage_->home(static_cast<std::int32_t>(g));
    if (is_sparse(static_cast<std::int32_t>(g))) {
      const auto before = static_cast<std::int32_t>(tables_[g].slots.size());
      home.pages().shrink(plans[g].next.slots, before);
    }
    for (const Slot& slot : plans[g].taken) home.slots().release(slot);
    plans[g].taken.clear();
  }
}

void RequestPages::drop_step(Stream stream) {
  constexpr const char* kFunction = "RequestPages.drop_step";
  if (closed_) fail_state(kFunction, "the request is closed");
  if (storage_->backend->is_capturing(stream)) fail_state(kFunction, "the stream is capturing");
  last_stream_ = stream;
  std::vector<Plan> plans(tables_.size());
  const std::int32_t tokens = storage_->layout.config().tokens_per_block;
  const auto pages = static_cast<std::size_t>(ceil_div(history_length_, tokens));
  for (std::size_t g = 0; g < plans.size(); ++g) {
    plans[g].next.slots = tables_[g].slots;
    if (is_sparse(static_cast<std::int32_t>(g))) continue;
    plans[g].given = tables_[g].scratch_slots;
    std::vector<std::int32_t>& slots = plans[g].next.slots;
    for (; slots.size() > pages; slots.pop_back()) {
      if (slots.back() != kBadPageIndex) plans[g].given.push_back(slots.back());
    }
  }
  commit(plans, history_length_, stream);
  capacity_ = history_length_;
}

// NOLINTNEXTLINE(bugprone-exception-escape): only a slot that is not in use is refused.
void RequestPages::close(Stream stream) noexcept {
  if (closed_) return;
  closed_ = true;
  std::vector<SlotOfGroup> given;
  for (std::size_t g = 0; g < tables_.size(); ++g) {
    const auto group = static_cast<std::int32_t>(g);
    Table table = std::exchange(tables_[g], {});
    storage_->count(group, {0, num_slots(table), 0});
    if (is_sparse(group)) {
      storage_->home(group).pages().shrink(table.slots, 0);
      continue;
    }
    for (const auto& slots : {table.slots, table.scratch_slots}) {
      for (const std::int32_t slot : slots) {
        if (slot != kBadPageIndex) given.push_back({group, slot});
      }
    }
  }
  storage_->give_back(stream, std::move(given));
  capacity_ = 0;
}

std::span<const std::int32_t> RequestPages::get_base_page_indices(std::int32_t layer_group) const {
  return table("RequestPages.get_base_page_indices", layer_group).slots;
}

void RequestPages::copy_base_page_indices(std::int32_t layer_group,
                                          std::span<std::int32_t> indices) const {
  constexpr const char* kFunction = "RequestPages.copy_base_page_indices";
  const std::vector<std::int32_t>& slots = table(kFunction, layer_group).slots;
  if (indices.size() < slots.size()) {
    fail_argument(kFunction, "indices must have at least ", slots.size(),
                  " entries, one per page, got ", indices.size());
  }
  const auto end = std::ranges::copy(slots, indices.begin()).out;
  std::fill(end, indices.end(), kBadPageIndex);
}

PageRange RequestPages::get_swa_scratch_range(std::int32_t layer_group) const {
  return table("RequestPages.get_swa_scratch_range", layer_group).scratch;
}

std::span<const std::int32_t> RequestPages::get_scratch_slots(std::int32_t layer_group) const {
  return table("RequestPages.get_scratch_slots", layer_group).scratch_slots;
}

bool RequestPages::has_scratch_slots() const {
  return std::ranges::any_of(tables_, [](const Table& t) { return !t.scratch_slots.empty(); });
}

void RequestPages::set_enable_swa_scratch_reuse(bool enable) {
  constexpr const char* kFunction = "RequestPages.enable_swa_scratch_reuse";
  if (enable && !storage_->layout.config().swa_scratch_reuse) {
    fail_argument(kFunction, "must be False without swa_scratch_reuse in the config, got True");
  }
  if (!enable && has_scratch_slots()) {
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

bool RequestPages::is_sparse(std::int32_t layer_group) const {
  return storage_->layout.layer_groups()[static_cast<std::size_t>(layer_group)]
      .life_cycle.is_sparse;
}

std::int64_t RequestPages::num_slots(const Table& table) {
  return std::ssize(table.slots) - std::ranges::count(table.slots, kBadPageIndex) +
         std::ssize(table.scratch_slots);
}

}  // namespace sparse_kvcm
