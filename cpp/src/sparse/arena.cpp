#include "sparse/arena.hpp"

#include <string>

namespace sparse_kvcm {

Arena::Arena(const KvCacheManagerConfig& config, Backend& backend)
    : num_slots_(static_cast<std::int32_t>(config.arena_pages * config.units_per_page())),
      max_leases_(config.max_leases),
      leases_(num_slots_, config.max_leases) {
  for (const SelectionGroupConfig& group : config.groups) add_group(config, group, backend);
}

std::int64_t Arena::member_bytes(const KvCacheManagerConfig& config,
                                 const SelectionGroupConfig& group) {
  return (config.arena_pages + 1) * group.layout.page_bytes(config.units_per_page());
}

std::int64_t Arena::entries_bytes(const KvCacheManagerConfig& config) {
  return config.arena_pages * config.units_per_page() * std::int64_t{sizeof(Entry)};
}

std::int64_t Arena::last_bytes(const KvCacheManagerConfig& config) {
  return config.max_leases * std::int64_t{sizeof(std::uint32_t)};
}

void Arena::add_group(const KvCacheManagerConfig& config, const SelectionGroupConfig& selection,
                      Backend& backend) {
  const UnitLayout& layout = selection.layout;
  const auto allocate = [&](std::int64_t bytes, const std::string& part) {
    return allocate_part(backend, static_cast<std::size_t>(bytes), "KvCacheManager", part);
  };
  const std::string name = "selection group " + std::to_string(groups_.size());
  Group group;
  for (std::size_t member = 0; member < selection.layers.size(); ++member) {
    group.members.push_back(
        allocate(member_bytes(config, selection),
                 "the arena of layer " + std::to_string(selection.layers[member])));
  }
  const auto num_members = static_cast<std::int32_t>(selection.layers.size());
  for (const HostPiece& piece : pack_host_row(layout, num_members).pieces) {
    std::byte* base = group.members[static_cast<std::size_t>(piece.member)]->device_data();
    group.pieces.push_back({base + layout.region_offset(piece.region, config.units_per_page()),
                            layout.page_bytes(config.units_per_page()), piece.bytes, piece.offset});
  }
  group.entries = allocate(entries_bytes(config), "entries of " + name);
  group.last = allocate(last_bytes(config), "clocks of " + name);
  all_entries_.push_back(reinterpret_cast<Entry*>(group.entries->device_data()));
  all_last_.push_back(reinterpret_cast<std::uint32_t*>(group.last->device_data()));
  groups_.push_back(std::move(group));
}

const BufferPtr& Arena::memory(std::int32_t group, std::int32_t member) const {
  return groups_[static_cast<std::size_t>(group)].members[static_cast<std::size_t>(member)];
}

Entry* Arena::entries(std::int32_t group) const {
  return all_entries_[static_cast<std::size_t>(group)];
}

std::uint32_t* Arena::last(std::int32_t group) const {
  return all_last_[static_cast<std::size_t>(group)];
}

std::int64_t Arena::metadata_bytes(std::int32_t group) const {
  const Group& g = groups_[static_cast<std::size_t>(group)];
  return static_cast<std::int64_t>(g.entries->bytes() + g.last->bytes());
}

std::span<const ops::Piece> Arena::pieces(std::int32_t group) const {
  return groups_[static_cast<std::size_t>(group)].pieces;
}

ops::ResetParams Arena::reset_params(std::span<const ops::LeaseReset> leases,
                                     std::uint32_t clock) const {
  return {leases, all_entries_, all_last_, num_slots_, max_leases_, clock};
}

}  // namespace sparse_kvcm
