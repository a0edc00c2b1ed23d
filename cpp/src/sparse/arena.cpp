#include "sparse/arena.hpp"

namespace sparse_kvcm {

Arena::Arena(const KvCacheManagerConfig& config, Backend& backend)
    : units_per_page_(config.units_per_page()),
      num_slots_(static_cast<std::int32_t>(config.arena_pages * config.units_per_page())),
      arena_pages_(config.arena_pages),
      max_leases_(config.max_leases),
      leases_(num_slots_, config.max_leases) {
  for (const SelectionGroupConfig& group : config.groups) add_group(group, backend);
}

void Arena::add_group(const SelectionGroupConfig& config, Backend& backend) {
  const std::int64_t page_bytes = config.layout.page_bytes(units_per_page_);
  Group group;
  for (std::size_t member = 0; member < config.layers.size(); ++member) {
    group.members.push_back(
        backend.allocate_device(static_cast<std::size_t>((arena_pages_ + 1) * page_bytes)));
  }
  const auto num_members = static_cast<std::int32_t>(config.layers.size());
  for (const HostPiece& piece : pack_host_row(config.layout, num_members).pieces) {
    std::byte* base = group.members[static_cast<std::size_t>(piece.member)]->device_data();
    group.pieces.push_back({base + config.layout.region_offset(piece.region, units_per_page_),
                            page_bytes, piece.bytes, piece.offset});
  }
  group.entries = backend.allocate_device(static_cast<std::size_t>(num_slots_) * sizeof(Entry));
  group.last =
      backend.allocate_device(static_cast<std::size_t>(max_leases_) * sizeof(std::uint32_t));
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
