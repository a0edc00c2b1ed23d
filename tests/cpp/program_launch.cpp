#include "program_launch.hpp"

#include <algorithm>

namespace sparse_kvcm::testing {

KvCacheManagerConfig random_config(Random& random) {
  KvCacheManagerConfig c;
  const std::int32_t page = 1 << random.below(4);
  c.tokens_per_unit = random.pick<std::int32_t>({1, 4});
  c.tokens_per_block = page * c.tokens_per_unit;
  const std::vector<UnitLayout> layouts = {UnitLayout({4}), UnitLayout({16}), UnitLayout({12, 4}),
                                           UnitLayout({8, 4}, 64), UnitLayout({4, 16})};
  std::int32_t widest = 1;
  std::int32_t layer = random.below(3);
  for (std::int32_t g = random.between(1, 3); g > 0; --g) {
    SelectionGroupConfig group;
    for (std::int32_t m = random.between(1, 3); m > 0; --m) {
      group.layers.push_back(layer);
      layer += random.between(1, 3);
    }
    group.top_k = random.between(1, 8);
    group.layout = random.pick(layouts);
    widest = std::max(widest, group.top_k);
    c.groups.push_back(std::move(group));
  }
  std::reverse(c.groups.begin(), c.groups.end());  // ids need not ascend
  const std::int32_t least = (widest + page - 1) / page;
  c.cached_slots = page * random.between(least, std::max(least, 16 / page));
  c.window_slots = page * random.between(1, 8 / page);
  c.max_new_units = random.between(1, std::min(c.window_slots, 3));
  const std::int32_t lease_pages = (c.cached_slots + c.window_slots) / page;
  c.arena_pages = lease_pages * random.between(2, 8) / 2;
  const std::int32_t host_units = random.percent(40) ? random.between(4, 32)  // soon full
                                                     : random.between(32, 160);
  c.host_pages = (host_units + page - 1) / page;
  c.max_leases = random.between(1, 6);
  return c;
}

LaunchOutputs::LaunchOutputs(const ResolveOutputs& defaults, std::uint32_t own, std::int32_t b,
                             std::int32_t k, std::int32_t max_new_units,
                             std::pmr::memory_resource* memory)
    : errors_(memory), all_(defaults) {
  using Member = std::int32_t* ResolveOutputs::*;
  struct Shape {
    Member member;
    std::int32_t cells;
  };
  const Shape shapes[] = {
      {&ResolveOutputs::slots, b * k},         {&ResolveOutputs::write_slots, b * max_new_units},
      {&ResolveOutputs::miss_ordinals, b * k}, {&ResolveOutputs::miss_slots, b * k},
      {&ResolveOutputs::miss_counts, b},       {&ResolveOutputs::hit_counts, b}};
  std::uint32_t bit = 1;
  for (const Shape& shape : shapes) {
    if (own & bit) {
      ints_.emplace_back(static_cast<std::size_t>(shape.cells), memory);
      argument_.*shape.member = all_.*shape.member = ints_.back().data();
    }
    std::fill_n(all_.*shape.member, shape.cells, kUnwritten);
    bit <<= 1;
  }
  if (own & bit) {
    errors_.resize(static_cast<std::size_t>(b));
    argument_.errors = all_.errors = errors_.data();
  }
  std::fill_n(all_.errors, b, static_cast<std::uint32_t>(kUnwritten));
}

}  // namespace sparse_kvcm::testing
