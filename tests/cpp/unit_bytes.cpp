#include "unit_bytes.hpp"

#include <algorithm>
#include <cstring>

namespace sparse_kvcm::testing {
namespace {

constexpr std::byte kPoison{0xA5};

std::uint64_t region_key(const UnitTag& tag, std::int32_t layer, std::size_t region) {
  const auto place = (static_cast<std::uint64_t>(layer) << 8) | region;
  const auto unit =
      (static_cast<std::uint64_t>(tag.request) << 32) | static_cast<std::uint32_t>(tag.ordinal);
  return mix(mix(unit) ^ (static_cast<std::uint64_t>(tag.version) << 32) ^ place);
}

std::uint32_t word(std::uint64_t key, std::int32_t i) {
  return static_cast<std::uint32_t>(key >> 32) + static_cast<std::uint32_t>(i) * 0x9E3779B9u;
}

void fill(std::byte* out, std::int32_t bytes, std::uint64_t key) {
  for (std::int32_t i = 0; i < bytes / 4; ++i) {
    const std::uint32_t value = word(key, i);
    std::memcpy(out + std::ptrdiff_t{4} * i, &value, 4);
  }
}

bool matches(const std::byte* in, std::int32_t bytes, std::uint64_t key) {
  for (std::int32_t i = 0; i < bytes / 4; ++i) {
    const std::uint32_t value = word(key, i);
    if (std::memcmp(in + std::ptrdiff_t{4} * i, &value, 4) != 0) return false;
  }
  return true;
}

bool is_poison(const std::byte* in, std::int64_t bytes) {
  return std::all_of(in, in + bytes, [](std::byte b) { return b == kPoison; });
}

}  // namespace

std::uint64_t mix(std::uint64_t value) {
  value += 0x9E3779B97F4A7C15u;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
  return value ^ (value >> 31);
}

UnitBytes::UnitBytes(const KvCacheManager& manager)
    : units_per_page_(manager.config().units_per_page()) {
  for (const SelectionGroupConfig& config : manager.config().groups) {
    Group group;
    group.first = num_layers();
    group.last = group.first + static_cast<std::int32_t>(config.layers.size());
    group.host = manager.host_history(static_cast<std::int32_t>(groups_.size())).data;
    group.row = pack_host_row(config.layout, group.last - group.first);
    groups_.push_back(std::move(group));
    for (const std::int32_t layer : config.layers) {
      Arena arena{
          manager.arena(layer).data, config.layout.page_bytes(units_per_page_), config.layout, {}};
      for (std::int32_t region = 0; region < config.layout.num_regions(); ++region)
        arena.region_offsets.push_back(config.layout.region_offset(region, units_per_page_));
      arenas_.push_back(std::move(arena));
    }
  }
}

std::byte* UnitBytes::unit(const Arena& arena, std::size_t region, std::int32_t slot) const {
  const std::int64_t page = slot / units_per_page_;
  const std::int64_t offset = slot % units_per_page_;
  return arena.data + page * arena.page_bytes + arena.region_offsets[region] +
         offset * arena.layout.region_bytes()[region];
}

void UnitBytes::write(std::int32_t layer, std::int32_t slot, const UnitTag& tag) const {
  const Arena& arena = arenas_[index(layer)];
  for (std::size_t region = 0; region < arena.region_offsets.size(); ++region)
    fill(unit(arena, region, slot), arena.layout.region_bytes()[region],
         region_key(tag, layer, region));
}

bool UnitBytes::holds(std::int32_t layer, std::int32_t slot, const UnitTag& tag) const {
  const Arena& arena = arenas_[index(layer)];
  for (std::size_t region = 0; region < arena.region_offsets.size(); ++region)
    if (!matches(unit(arena, region, slot), arena.layout.region_bytes()[region],
                 region_key(tag, layer, region)))
      return false;
  return true;
}

void UnitBytes::write_group(std::int32_t group, std::int32_t slot, const UnitTag& tag) const {
  for (std::int32_t l = first_layer(group); l < last_layer(group); ++l) write(l, slot, tag);
}

bool UnitBytes::group_holds(std::int32_t group, std::int32_t slot, const UnitTag& tag) const {
  for (std::int32_t l = first_layer(group); l < last_layer(group); ++l)
    if (!holds(l, slot, tag)) return false;
  return true;
}

void UnitBytes::poison_slots(std::int32_t first, std::int32_t count) const {
  for (const Arena& arena : arenas_)
    for (std::size_t region = 0; region < arena.region_offsets.size(); ++region)
      for (std::int32_t slot = first; slot < first + count; ++slot)
        std::fill_n(unit(arena, region, slot), arena.layout.region_bytes()[region], kPoison);
}

bool UnitBytes::slots_are_poison(std::int32_t first, std::int32_t count) const {
  for (const Arena& arena : arenas_)
    for (std::size_t region = 0; region < arena.region_offsets.size(); ++region)
      for (std::int32_t slot = first; slot < first + count; ++slot)
        if (!is_poison(unit(arena, region, slot), arena.layout.region_bytes()[region]))
          return false;
  return true;
}

bool UnitBytes::host_holds(std::int32_t group, std::int32_t page, std::int32_t offset,
                           const UnitTag& tag) const {
  const Group& g = groups_[index(group)];
  const std::int64_t host_unit = std::int64_t{page} * units_per_page_ + offset;
  const std::byte* row = g.host + host_unit * g.row.unit_bytes;
  return std::all_of(g.row.pieces.begin(), g.row.pieces.end(), [&](const HostPiece& piece) {
    return matches(row + piece.offset, piece.bytes,
                   region_key(tag, g.first + piece.member, index(piece.region)));
  });
}

void UnitBytes::poison_host_page(std::int32_t page) const {
  for (const Group& group : groups_) {
    const std::int64_t bytes = units_per_page_ * group.row.unit_bytes;
    std::fill_n(group.host + page * bytes, bytes, kPoison);
  }
}

bool UnitBytes::host_page_is_poison(std::int32_t page) const {
  return std::all_of(groups_.begin(), groups_.end(), [&](const Group& group) {
    const std::int64_t bytes = units_per_page_ * group.row.unit_bytes;
    return is_poison(group.host + page * bytes, bytes);
  });
}

std::int64_t UnitBytes::unit_bytes(std::int32_t layer) const {
  return arenas_[index(layer)].layout.unit_bytes();
}

std::vector<std::byte> UnitBytes::rows(std::int32_t layer, const std::vector<UnitTag>& tags,
                                       std::int32_t padding) const {
  const Arena& arena = arenas_[index(layer)];
  const std::size_t stride = static_cast<std::size_t>(unit_bytes(layer) + padding);
  std::vector<std::byte> out(tags.size() * stride, kPoison);
  for (std::size_t i = 0; i < tags.size(); ++i) {
    std::byte* at = out.data() + i * stride;
    for (std::size_t region = 0; region < arena.region_offsets.size(); ++region) {
      const std::int32_t bytes = arena.layout.region_bytes()[region];
      fill(at, bytes, region_key(tags[i], layer, region));
      at += bytes;
    }
  }
  return out;
}

}  // namespace sparse_kvcm::testing
