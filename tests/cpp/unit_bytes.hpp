// The bytes of units, as a test on the CPU backend sees them: in the arena, in host history and in
// the rows of an import.
//
// A unit's bytes follow from its tag, so that any slot can be asked whether it holds a given unit.
// Memory that nobody may read is poisoned: a stale right answer cannot pass.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "sparse_kvcm/kv_cache_manager.hpp"

namespace sparse_kvcm::testing {

// Scrambles 64 bits (the finaliser of splitmix64).
[[nodiscard]] std::uint64_t mix(std::uint64_t value);

// `version` tells the writes of one ordinal apart.
struct UnitTag {
  std::uint32_t request = 0;
  std::int32_t ordinal = 0;
  std::uint32_t version = 0;
};

class UnitBytes {
 public:
  explicit UnitBytes(const KvCacheManager& manager);

  // Layers are counted as in KvCacheManager::layers().
  [[nodiscard]] std::int32_t num_layers() const {
    return static_cast<std::int32_t>(arenas_.size());
  }
  [[nodiscard]] std::int32_t first_layer(std::int32_t group) const {
    return groups_[index(group)].first;
  }
  [[nodiscard]] std::int32_t last_layer(std::int32_t group) const {
    return groups_[index(group)].last;
  }

  void write(std::int32_t layer, std::int32_t slot, const UnitTag& tag) const;
  [[nodiscard]] bool holds(std::int32_t layer, std::int32_t slot, const UnitTag& tag) const;
  // All member layers of `group`.
  void write_group(std::int32_t group, std::int32_t slot, const UnitTag& tag) const;
  [[nodiscard]] bool group_holds(std::int32_t group, std::int32_t slot, const UnitTag& tag) const;

  // All layers.
  void poison_slots(std::int32_t first, std::int32_t count) const;
  [[nodiscard]] bool slots_are_poison(std::int32_t first, std::int32_t count) const;

  // All member layers of one group, or all groups.
  [[nodiscard]] bool host_holds(std::int32_t group, std::int32_t page, std::int32_t offset,
                                const UnitTag& tag) const;
  void poison_host_page(std::int32_t page) const;
  [[nodiscard]] bool host_page_is_poison(std::int32_t page) const;

  // One layer's rows for import_history, `padding` bytes of poison after each.
  [[nodiscard]] std::vector<std::byte> rows(std::int32_t layer, const std::vector<UnitTag>& tags,
                                            std::int32_t padding) const;
  [[nodiscard]] std::int64_t unit_bytes(std::int32_t layer) const;

 private:
  struct Arena {
    std::byte* data = nullptr;
    std::int64_t page_bytes = 0;
    UnitLayout layout{{4}};
    std::vector<std::int64_t> region_offsets;
  };
  struct Group {
    std::int32_t first = 0;  // layers [first, last)
    std::int32_t last = 0;
    std::byte* host = nullptr;
    HostRowLayout row;
  };
  static std::size_t index(std::int32_t i) { return static_cast<std::size_t>(i); }
  [[nodiscard]] std::byte* unit(const Arena& arena, std::size_t region, std::int32_t slot) const;

  std::int32_t units_per_page_ = 0;
  std::vector<Arena> arenas_;
  std::vector<Group> groups_;
};

}  // namespace sparse_kvcm::testing
