#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "group_fixture.hpp"

namespace sparse_kvcm::testing {
namespace {

using ops::MoveDirection;
using ops::UnitMove;

class MoveUnitsTest : public DeviceTest {
 protected:
  // `count` moves between distinct slots and distinct host units.
  std::vector<UnitMove> distinct_moves(std::int32_t num_slots, std::int64_t num_host_units,
                                       std::size_t count) {
    std::vector<std::int32_t> slots(static_cast<std::size_t>(num_slots));
    std::vector<std::int64_t> units(static_cast<std::size_t>(num_host_units));
    std::iota(slots.begin(), slots.end(), 0);
    std::iota(units.begin(), units.end(), 0);
    random_.shuffle(slots);
    random_.shuffle(units);
    std::vector<UnitMove> moves;
    for (std::size_t i = 0; i < count; ++i) moves.push_back({units[i], slots[i]});
    return moves;
  }

  void move(const std::vector<UnitMove>& moves, const std::vector<ops::GroupMemory>& groups,
            MoveDirection direction) {
    ops::move_units(device(), {moves, groups, direction}, 0);
  }

  Random random_{11};
};
SPARSE_KVCM_ON_EVERY_DEVICE(MoveUnitsTest);

TEST_P(MoveUnitsTest, FlushAndLoadMoveEveryByteAndNoOther) {
  for (const UnitLayout& layout : all_layouts()) {
    for (const std::int32_t page : all_page_sizes()) {
      const GroupShape shape{layout, random_.in(1, 4), page, 2 * page + 9, 10};
      SCOPED_TRACE(describe(shape));
      TestGroup group(device(), shape);
      const auto moves = distinct_moves(shape.num_slots, group.num_host_units(), 10);
      const std::vector<UnitMove> out(moves.begin(), moves.begin() + 5);
      const std::vector<UnitMove> in(moves.begin() + 5, moves.end());
      for (const UnitMove& flushed : out) group.tag_arena(flushed.slot, flushed.slot);
      for (const UnitMove& loaded : in) group.tag_host(loaded.host_unit, -1 - loaded.host_unit);
      group.upload();

      for (const UnitMove& flushed : out) group.tag_host(flushed.host_unit, flushed.slot);
      move(out, {group.memory()}, MoveDirection::kArenaToHost);
      ASSERT_NO_FATAL_FAILURE(group.expect_as_modelled());

      for (const UnitMove& loaded : in) group.tag_arena(loaded.slot, -1 - loaded.host_unit);
      move(in, {group.memory()}, MoveDirection::kHostToArena);
      ASSERT_NO_FATAL_FAILURE(group.expect_as_modelled());
    }
  }
}

TEST_P(MoveUnitsTest, AllGroupsMoveTheSameUnitsEachInItsOwnLayout) {
  TestGroup wide(device(), {UnitLayout({656}), 3, 4, 20, 6});
  TestGroup split(device(), {UnitLayout({576, 8}, 576), 2, 4, 24, 5});
  const std::vector<UnitMove> moves{{0, 19}, {19, 0}, {7, 8}};
  for (TestGroup* group : {&wide, &split}) {
    for (const UnitMove& flushed : moves) group->tag_arena(flushed.slot, flushed.slot);
    group->upload();
    for (const UnitMove& flushed : moves) group->tag_host(flushed.host_unit, flushed.slot);
  }
  move(moves, {wide.memory(), split.memory()}, MoveDirection::kArenaToHost);
  wide.expect_as_modelled();
  split.expect_as_modelled();
}

TEST_P(MoveUnitsTest, NoMovesAndNoGroupsAreNoOps) {
  TestGroup group(device(), {UnitLayout({656}), 1, 4, 20, 6});
  group.upload();
  move({}, {group.memory()}, MoveDirection::kArenaToHost);
  move({{3, 4}}, {}, MoveDirection::kHostToArena);
  group.expect_as_modelled();
}

}  // namespace
}  // namespace sparse_kvcm::testing
