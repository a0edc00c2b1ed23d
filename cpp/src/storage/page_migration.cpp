#include "storage/page_migration.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/rounding.hpp"

namespace sparse_kvcm {

PageMigration::PageMigration(RequestPages& pages, PageDirection direction)
    : pages_(pages),
      storage_(*pages.storage_),
      direction_(direction),
      groups_(pages.tables_.size()) {}

// NOLINTNEXTLINE(bugprone-exception-escape): only a slot that is not in use is refused.
PageMigration::~PageMigration() {
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    for (Slot& slot : groups_[g].taken) {
      destination(static_cast<std::int32_t>(g)).slots().release(std::move(slot));
    }
  }
}

bool PageMigration::reserve(std::int32_t history_length, Stream stream) {
  storage_.settle();
  history_length_ = history_length;
  const auto num_groups = static_cast<std::int32_t>(groups_.size());
  for (std::int32_t g = 0; g < num_groups; ++g) {
    if (!pages_.is_sparse(g)) plan(g, history_length);
  }
  bool enough = direction_ == PageDirection::kToHost || fits_on_device();
  std::int32_t g = 0;
  for (; enough && g < num_groups; ++g) enough = take(g, stream);
  if (!enough && g > 0) pages_.count(g - 1, {0, 0, 1});
  if (enough && direction_ == PageDirection::kToDevice && pages_.host_ready_) {
    storage_.backend->wait(stream, *pages_.host_ready_);
  }
  return enough;
}

void PageMigration::plan(std::int32_t layer_group, std::int32_t history_length) {
  const RequestPages::Table& table = pages_.tables_[static_cast<std::size_t>(layer_group)];
  std::vector<RequestPages::HostPage>& moving = group(layer_group).pages;
  if (direction_ == PageDirection::kToDevice) {
    moving = table.host_pages;
    return;
  }
  const std::int32_t tokens = storage_.layout.config().tokens_per_block;
  const PageRange stale = stale_pages(desc(layer_group).life_cycle, tokens, history_length);
  const std::int32_t end =
      std::min(ceil_div(history_length, tokens), static_cast<std::int32_t>(table.slots.size()));
  for (std::int32_t page = 0; page < end; ++page) {
    const std::int32_t slot = table.slots[static_cast<std::size_t>(page)];
    if (slot != kBadPageIndex && !stale.contains(page)) moving.push_back({page, slot});
  }
}

// All pool groups of the device, with what the request takes there: one that is full already holds
// up every request, so that those which run can still grow.
bool PageMigration::fits_on_device() const {
  const StorageLayout& layout = storage_.layout;
  for (std::size_t p = 0; p < storage_.pool_groups.size(); ++p) {
    if (layout.pool_groups()[p].level != kGpuLevel) continue;
    PoolGroup& pools = storage_.pool_groups[p];
    pools.refresh();
    std::int64_t used = std::int64_t{pools.num_slots()} - pools.num_free();
    for (const std::int32_t g : layout.pool_groups()[p].layer_groups) {
      used += std::ssize(groups_[static_cast<std::size_t>(g)].pages);
    }
    if (!fits(used, pools.num_slots(), layout.config().max_util_for_resume)) return false;
  }
  return true;
}

bool PageMigration::take(std::int32_t layer_group, Stream stream) {
  Group& moving = group(layer_group);
  if (moving.pages.empty()) return true;
  if (desc(layer_group).cold_pool_group < 0) return false;
  PoolGroup& pools = destination(layer_group);
  pools.refresh();
  const auto count = static_cast<std::int32_t>(moving.pages.size());
  if (!pools.slots().allocate(count, moving.taken)) return false;
  const Event* waited = nullptr;
  for (const Slot& slot : moving.taken) {
    if (slot.ready && slot.ready.get() != waited) storage_.backend->wait(stream, *slot.ready);
    if (slot.ready) waited = slot.ready.get();
  }
  return true;
}

void PageMigration::copy(Stream stream) const {
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    if (!groups_[g].pages.empty()) copy_group(static_cast<std::int32_t>(g), stream);
  }
}

// NOLINTNEXTLINE(bugprone-exception-escape): as ~PageMigration.
void PageMigration::give_back(Stream stream) noexcept {
  std::vector<SlotOfGroup> slots;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const auto layer_group = static_cast<std::int32_t>(g);
    for (const Slot& slot : groups_[g].taken) {
      slots.push_back({layer_group, slot.id, direction_ == PageDirection::kToHost});
    }
    groups_[g].taken.clear();
  }
  storage_.give_back(stream, std::move(slots));
}

// A page lies in one piece on the host, its parts in the order of the pools.
void PageMigration::copy_group(std::int32_t layer_group, Stream stream) const {
  const Group& moving = groups_[static_cast<std::size_t>(layer_group)];
  const bool to_host = direction_ == PageDirection::kToHost;
  std::vector<PageCopy::Page> pages;
  pages.reserve(moving.pages.size());
  for (std::size_t i = 0; i < moving.pages.size(); ++i) {
    const std::int32_t from = moving.pages[i].slot;
    const std::int32_t to = moving.taken[i].id;
    pages.push_back(to_host ? PageCopy::Page{from, to} : PageCopy::Page{to, from});
  }
  const std::vector<PoolGroupDesc>& descs = storage_.layout.pool_groups();
  const LayerGroupDesc& layers = desc(layer_group);
  const std::vector<std::int64_t>& parts =
      descs[static_cast<std::size_t>(layers.pool_group)].slot_bytes;
  const std::int64_t host_stride =
      descs[static_cast<std::size_t>(layers.cold_pool_group)].slot_bytes.front();
  std::byte* host = storage_.cold_home(layer_group).pool(0)->address();
  for (std::size_t pool = 0; pool < parts.size(); ++pool) {
    std::byte* device = storage_.home(layer_group).pool(static_cast<std::int32_t>(pool))->address();
    storage_.backend->copy_pages(
        {device, parts[pool], host, host_stride, parts[pool], pages, direction_}, stream);
    host += parts[pool];
  }
}

std::int64_t PageMigration::num_pages() const {
  std::int64_t pages = 0;
  for (const Group& group : groups_) pages += std::ssize(group.pages);
  return pages;
}

std::int64_t PageMigration::num_bytes() const {
  std::int64_t bytes = 0;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const auto pools = static_cast<std::size_t>(desc(static_cast<std::int32_t>(g)).pool_group);
    const std::vector<std::int64_t>& parts = storage_.layout.pool_groups()[pools].slot_bytes;
    bytes +=
        std::ssize(groups_[g].pages) * std::accumulate(parts.begin(), parts.end(), std::int64_t{0});
  }
  return bytes;
}

// NOLINTNEXTLINE(bugprone-exception-escape): only a slot that is not in use is refused.
void PageMigration::commit(const EventPtr& copied) noexcept {
  const bool to_host = direction_ == PageDirection::kToHost;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const auto layer_group = static_cast<std::int32_t>(g);
    if (pages_.is_sparse(layer_group)) continue;
    const std::int64_t moved = std::ssize(groups_[g].pages);
    const std::int64_t before = RequestPages::num_slots(pages_.tables_[g]);
    to_host ? commit_to_host(layer_group, copied) : commit_to_device(layer_group, copied);
    pages_.count(layer_group, {moved, before, 0, to_host ? moved : 0, to_host ? 0 : moved});
    groups_[g].taken.clear();
  }
  if (to_host) {
    pages_.capacity_ = pages_.history_length_ = history_length_;
    pages_.host_ready_ = copied;
  } else {
    pages_.host_ready_ = nullptr;
  }
  pages_.suspended_ = to_host;
}

// Pages that do not move go too: they are stale, scratch, or of a step that did not happen.
void PageMigration::commit_to_host(std::int32_t layer_group, const EventPtr& copied) {
  RequestPages::Table& table = pages_.tables_[static_cast<std::size_t>(layer_group)];
  PoolGroup& home = storage_.home(layer_group);
  for (std::int32_t page = 0; std::cmp_less(page, table.slots.size()); ++page) {
    const std::int32_t slot = table.slots[static_cast<std::size_t>(page)];
    if (slot == kBadPageIndex) continue;
    home.slots().release({slot, copied});
    pages_.set_entry(table, page, kBadPageIndex);
  }
  for (const std::int32_t slot : table.scratch_slots) home.slots().release({slot, copied});
  table.scratch_slots.clear();
  table.scratch = {};
  pages_.set_size(table, ceil_div(history_length_, storage_.layout.config().tokens_per_block));
  const Group& moved = group(layer_group);
  for (std::size_t i = 0; i < moved.pages.size(); ++i) {
    table.host_pages.push_back({moved.pages[i].page, moved.taken[i].id});
  }
}

void PageMigration::commit_to_device(std::int32_t layer_group, const EventPtr& copied) {
  RequestPages::Table& table = pages_.tables_[static_cast<std::size_t>(layer_group)];
  const Group& moved = group(layer_group);
  for (std::size_t i = 0; i < moved.pages.size(); ++i) {
    pages_.set_entry(table, moved.pages[i].page, moved.taken[i].id);
    storage_.cold_home(layer_group).slots().release({moved.pages[i].slot, copied});
  }
  table.host_pages.clear();
}

PoolGroup& PageMigration::destination(std::int32_t layer_group) const {
  return direction_ == PageDirection::kToHost ? storage_.cold_home(layer_group)
                                              : storage_.home(layer_group);
}

const LayerGroupDesc& PageMigration::desc(std::int32_t layer_group) const {
  return storage_.layout.layer_groups()[static_cast<std::size_t>(layer_group)];
}

}  // namespace sparse_kvcm
