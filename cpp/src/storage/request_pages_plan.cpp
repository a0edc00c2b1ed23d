// Planning of one dense layer group's next table.
#include "storage/request_pages_plan.hpp"

#include <algorithm>
#include <array>

#include "core/rounding.hpp"
#include "storage/storage_state.hpp"

namespace sparse_kvcm {

// Which pages stay, go and come. Only those can change that a border passes: of the stale pages, of
// scratch, and the end.
RequestPages::Plan RequestPages::plan_table(std::int32_t layer_group, KvCacheDesc request) const {
  const StorageLayout& layout = storage_->layout;
  const std::int32_t tokens = layout.config().tokens_per_block;
  const Table& table = tables_[static_cast<std::size_t>(layer_group)];
  const LifeCycle& life_cycle =
      layout.layer_groups()[static_cast<std::size_t>(layer_group)].life_cycle;
  const PageRange stale_before = stale_pages(life_cycle, tokens, history_length_);
  const PageRange stale = stale_pages(life_cycle, tokens, request.history_length);
  const auto pages_before = static_cast<std::int32_t>(table.slots.size());
  Plan plan;
  plan.num_pages = ceil_div(request.capacity, tokens);
  if (scratch_reuse_) plan.scratch = layout.scratch_range(layer_group, request);
  std::array<PageRange, 4> changing = {
      PageRange{std::min(stale_before.end, stale.begin), stale.end},
      table.scratch,
      plan.scratch,
      {std::min(pages_before, plan.num_pages), std::max(pages_before, plan.num_pages)}};
  std::ranges::sort(changing, {}, &PageRange::begin);
  std::int32_t page = 0;
  for (const PageRange& range : changing) {
    for (page = std::max(page, range.begin); page < range.end; ++page) {
      const std::int32_t slot =
          page < pages_before ? table.slots[static_cast<std::size_t>(page)] : kBadPageIndex;
      const bool kept =
          page < plan.num_pages && !stale.contains(page) && !plan.scratch.contains(page);
      if (kept == (slot != kBadPageIndex)) continue;
      if (!kept) plan.given.push_back(slot);
      plan.edits.push_back({page, kBadPageIndex, kept});
    }
  }
  plan_scratch(layer_group, plan);
  return plan;
}

// Scratch slots beyond those wanted go, the others stay.
void RequestPages::plan_scratch(std::int32_t layer_group, Plan& plan) const {
  const std::vector<std::int32_t>& before =
      tables_[static_cast<std::size_t>(layer_group)].scratch_slots;
  const auto wanted =
      static_cast<std::size_t>(storage_->layout.scratch_slots(layer_group, plan.scratch.size()));
  const auto same = before.begin() + static_cast<std::ptrdiff_t>(std::min(wanted, before.size()));
  plan.scratch_slots.assign(before.begin(), same);
  plan.scratch_slots.resize(wanted, kBadPageIndex);
  plan.given.insert(plan.given.end(), same, before.end());
}

// Gives slots to what wants some. False if the pool group has too few; the plan then holds what it
// took.
bool RequestPages::take_slots(std::int32_t layer_group, Plan& plan, Stream stream) {
  std::vector<std::int32_t*> wanted;
  for (Plan::Edit& edit : plan.edits) {
    if (edit.wants_slot) wanted.push_back(&edit.slot);
  }
  for (std::int32_t& slot : plan.scratch_slots) {
    if (slot == kBadPageIndex) wanted.push_back(&slot);
  }
  PoolGroup& home = storage_->home(layer_group);
  home.refresh();
  auto next = wanted.begin();
  std::erase_if(plan.given, [&](std::int32_t slot) {
    if (next == wanted.end() || slot >= home.slots().target()) return false;
    **next++ = slot;
    return true;
  });
  const auto missing = static_cast<std::int32_t>(wanted.end() - next);
  if (!home.slots().allocate(missing, plan.taken)) return false;
  const Event* waited = nullptr;
  for (const Slot& slot : plan.taken) {
    if (slot.ready && slot.ready.get() != waited) storage_->backend->wait(stream, *slot.ready);
    if (slot.ready) waited = slot.ready.get();
    **next++ = slot.id;
  }
  return true;
}

}  // namespace sparse_kvcm
