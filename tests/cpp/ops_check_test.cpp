// Every host-side argument of `ops`, one fault at a time. Nothing here is dereferenced, so the
// pointers are dummies; the last test shows that a refused call leaves memory alone.
#include "backend/ops_check.hpp"

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "ops_fixture.hpp"
#include "sparse_kvcm/error.hpp"

namespace sparse_kvcm::testing {
namespace {

constexpr std::int64_t kMaxSlots = std::numeric_limits<std::int32_t>::max();
constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();

alignas(16) std::byte dummy[64];
template <class T>
T* some() {
  return reinterpret_cast<T*>(dummy);
}

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "accepted";
}

// The message that `edit` of otherwise good arguments gives.
template <class Params>
std::string message_after(Params params, const std::function<void(Params&)>& edit) {
  edit(params);
  return error_of([&] { check(params); });
}

ops::LaunchRows good_launch() { return {some<std::int32_t>(), 2, some<RowState>(), 3}; }
ops::LaunchErrors good_errors() { return {some<std::uint32_t>(), nullptr, nullptr}; }

TEST(OpsCheckTest, ResolveNamesEachBadArgument) {
  using Params = ops::ResolveParams;
  Params good;
  good.launch = good_launch();
  good.selection = good.slots = good.write_slots = some<std::int32_t>();
  good.miss_ordinals = good.miss_slots = some<std::int32_t>();
  good.miss_counts = good.hit_counts = some<std::int32_t>();
  good.selection_stride = good.k = 8;
  good.step = some<StepState>();
  good.entries = some<Entry>();
  good.num_slots = 100;
  good.last = some<std::uint32_t>();
  good.num_leases = 3;
  good.max_new_units = 1;
  good.errors = good_errors();
  const auto after = [&](const std::function<void(Params&)>& edit) {
    return message_after(good, edit);
  };
  EXPECT_EQ(after([](Params&) {}), "accepted");
  EXPECT_EQ(after([](Params& p) { p.k = p.launch.b = -1; }),
            "[resolve] launch.b must be >= 0, got -1");
  EXPECT_EQ(after([](Params& p) { p.launch.num_rows = -1; }),
            "[resolve] launch.num_rows must be >= 0, got -1");
  EXPECT_EQ(after([](Params& p) { p.launch.rows = nullptr; }),
            "[resolve] launch.rows must point to 2 elements, got null");
  EXPECT_EQ(after([](Params& p) { p.launch.row_states = nullptr; }),
            "[resolve] launch.row_states must point to 3 elements, got null");
  EXPECT_EQ(after([](Params& p) { p.k = 0; }), "[resolve] k must be in [1, 65535], got 0");
  EXPECT_EQ(after([](Params& p) { p.k = 65'536; }), "[resolve] k must be in [1, 65535], got 65536");
  EXPECT_EQ(after([](Params& p) { p.selection = nullptr; }),
            "[resolve] selection must point to 16 elements, got null");
  EXPECT_EQ(after([](Params& p) { p.selection_stride = 7; }),
            "[resolve] selection_stride must be >= k = 8, got 7");
  EXPECT_EQ(after([](Params& p) { p.selection_stride = kHuge; }),
            "[resolve] selection_stride must be <= 1152921504606846975 with b = 2, got "
            "9223372036854775807");
  EXPECT_EQ(after([](Params& p) { p.step = nullptr; }),
            "[resolve] step must point to 1 elements, got null");
  EXPECT_EQ(after([](Params& p) { p.entries = nullptr; }),
            "[resolve] entries must point to 100 elements, got null");
  EXPECT_EQ(after([](Params& p) { p.num_slots = -1; }),
            "[resolve] num_slots must be in [0, 2147483647], got -1");
  EXPECT_EQ(after([](Params& p) { p.num_slots = kMaxSlots + 1; }),
            "[resolve] num_slots must be in [0, 2147483647], got 2147483648");
  EXPECT_EQ(after([](Params& p) { p.last = nullptr; }),
            "[resolve] last must point to 3 elements, got null");
  EXPECT_EQ(after([](Params& p) { p.num_leases = -1; }),
            "[resolve] num_leases must be >= 0, got -1");
  EXPECT_EQ(after([](Params& p) { p.max_new_units = -1; }),
            "[resolve] max_new_units must be >= 0, got -1");
  EXPECT_EQ(after([](Params& p) { p.max_units = 0; }),
            "[resolve] max_units must be in [1, 16777215], got 0");
  EXPECT_EQ(after([](Params& p) { p.threads = 128; }),
            "[resolve] threads must be 0, 256 or 512, got 128");
  EXPECT_EQ(after([](Params& p) { p.no_write_slot = -2; }),
            "[resolve] no_write_slot must be >= -1, got -2");
  EXPECT_EQ(after([](Params& p) { p.slots = nullptr; }),
            "[resolve] slots must point to 16 elements, got null");
  EXPECT_EQ(after([](Params& p) { p.write_slots = nullptr; }),
            "[resolve] write_slots must point to 2 elements, got null");
  EXPECT_EQ(after([](Params& p) { p.miss_ordinals = nullptr; }),
            "[resolve] miss_ordinals must point to 16 elements, got null");
  EXPECT_EQ(after([](Params& p) { p.miss_slots = nullptr; }),
            "[resolve] miss_slots must point to 16 elements, got null");
  EXPECT_EQ(after([](Params& p) { p.miss_counts = nullptr; }),
            "[resolve] miss_counts must point to 2 elements, got null");
  EXPECT_EQ(after([](Params& p) { p.hit_counts = nullptr; }),
            "[resolve] hit_counts must point to 2 elements, got null");
  EXPECT_EQ(after([](Params& p) { p.errors.errors = nullptr; }),
            "[resolve] errors.errors must point to 2 elements, got null");
}

TEST(OpsCheckTest, PointersToNothingMayBeNull) {
  ops::ResolveParams resolve;
  resolve.k = 1;
  resolve.selection_stride = 1;
  resolve.step = some<StepState>();
  EXPECT_EQ(error_of([&] { check(resolve); }), "accepted");
  EXPECT_EQ(error_of([] { check(ops::MoveParams{}); }), "accepted");
  EXPECT_EQ(error_of([] { check(ops::ResetParams{}); }), "accepted");
  EXPECT_EQ(error_of([] {
              ops::ConvertParams convert;
              convert.k = convert.units_per_page = 1;
              check(convert);
            }),
            "accepted");
}

class GroupCheckTest : public ::testing::Test {
 protected:
  GroupCheckTest() {
    pieces_ = {{dummy, 64 * 288, 288, 0}, {dummy, 64 * 36, 36, 288}};
    good_.launch = good_launch();
    good_.miss_ordinals = good_.miss_slots = good_.miss_counts = some<std::int32_t>();
    good_.k = 8;
    good_.page_table = some<std::int32_t>();
    good_.max_pages = 5;
    good_.memory = {pieces_, dummy, 336, 10, 640, 64};
    good_.errors = good_errors();
  }

  std::string after(const std::function<void(ops::FetchParams&)>& edit) {
    return message_after(good_, edit);
  }
  std::string after_piece(const std::function<void(ops::Piece&)>& edit) {
    const auto kept = pieces_;
    edit(pieces_[1]);
    const std::string message = error_of([&] { check(good_); });
    pieces_ = kept;
    return message;
  }

  std::vector<ops::Piece> pieces_;
  ops::FetchParams good_;
};

TEST_F(GroupCheckTest, FetchNamesEachBadArgument) {
  using Params = ops::FetchParams;
  EXPECT_EQ(after([](Params&) {}), "accepted");
  EXPECT_EQ(after([](Params& p) { p.launch.b = -1; }), "[fetch] launch.b must be >= 0, got -1");
  EXPECT_EQ(after([](Params& p) { p.launch.b = p.k = 46'341; }),
            "[fetch] launch.b * k must be in [0, 2147483647], got 2147488281");
  EXPECT_EQ(after([](Params& p) { p.k = 0; }), "[fetch] k must be >= 1, got 0");
  EXPECT_EQ(after([](Params& p) { p.miss_ordinals = nullptr; }),
            "[fetch] miss_ordinals must point to 16 elements, got null");
  EXPECT_EQ(after([](Params& p) { p.miss_slots = nullptr; }),
            "[fetch] miss_slots must point to 16 elements, got null");
  EXPECT_EQ(after([](Params& p) { p.miss_counts = nullptr; }),
            "[fetch] miss_counts must point to 2 elements, got null");
  EXPECT_EQ(after([](Params& p) { p.page_table = nullptr; }),
            "[fetch] page_table must point to 15 elements, got null");
  EXPECT_EQ(after([](Params& p) { p.max_pages = -1; }),
            "[fetch] max_pages must be in [0, 2147483647], got -1");
  EXPECT_EQ(after([](Params& p) { p.errors.errors = nullptr; }),
            "[fetch] errors.errors must point to 2 elements, got null");
}

TEST_F(GroupCheckTest, GroupMemoryNamesEachBadArgument) {
  using Params = ops::FetchParams;
  EXPECT_EQ(after([](Params& p) { p.memory.num_slots = kMaxSlots + 1; }),
            "[fetch] memory.num_slots must be in [0, 2147483647], got 2147483648");
  EXPECT_EQ(after([](Params& p) { p.memory.units_per_page = 0; }),
            "[fetch] memory.units_per_page must be >= 1, got 0");
  EXPECT_EQ(after([](Params& p) { p.memory.num_host_pages = -1; }),
            "[fetch] memory.num_host_pages must be in [0, 2147483647], got -1");
  for (const std::int64_t bytes : {0, -16, 338}) {
    EXPECT_EQ(after([=](Params& p) { p.memory.host_unit_bytes = bytes; }),
              "[fetch] memory.host_unit_bytes must be a positive multiple of 4, got " +
                  std::to_string(bytes));
  }
  EXPECT_EQ(after([](Params& p) { p.memory.host_unit_bytes = kHuge - 3; }),
            "[fetch] memory.host_unit_bytes must be <= 14411518807585587 with 640 host units, got "
            "9223372036854775804");
  EXPECT_EQ(after([](Params& p) { p.memory.host = nullptr; }),
            "[fetch] memory.host must point to 640 elements, got null");
  EXPECT_EQ(after([](Params& p) { p.memory.host = dummy + 2; }).substr(0, 53),
            "[fetch] memory.host must be aligned to 4 bytes, got 0");
  EXPECT_EQ(after([](Params& p) { p.memory.pieces = {}; }),
            "[fetch] memory.pieces.size() must be in [1, 64], got 0");
  const std::vector<ops::Piece> many(65, pieces_[0]);
  EXPECT_EQ(after([&](Params& p) { p.memory.pieces = many; }),
            "[fetch] memory.pieces.size() must be in [1, 64], got 65");
}

TEST_F(GroupCheckTest, PieceNamesEachBadArgument) {
  using ops::Piece;
  for (const std::int32_t bytes : {0, -4, 34}) {
    EXPECT_EQ(after_piece([=](Piece& p) { p.bytes = bytes; }),
              "[fetch] memory.pieces[1].bytes must be a positive multiple of 4, got " +
                  std::to_string(bytes));
  }
  for (const std::int32_t offset : {-4, 2}) {
    EXPECT_EQ(after_piece([=](Piece& p) { p.host_offset = offset; }),
              "[fetch] memory.pieces[1].host_offset must be a multiple of 4, >= 0, got " +
                  std::to_string(offset));
  }
  EXPECT_EQ(
      after_piece([](Piece& p) { p.host_offset = 304; }),
      "[fetch] memory.pieces[1].host_offset must be 288, right behind the piece before, got 304");
  EXPECT_EQ(after_piece([](Piece& p) { p.bytes = 52; }),
            "[fetch] memory.pieces[1].host_offset + bytes must be <= host_unit_bytes = 336, "
            "got 340");
  for (const std::int64_t bytes : {2300, 2306}) {
    EXPECT_EQ(after_piece([=](Piece& p) { p.page_bytes = bytes; }),
              "[fetch] memory.pieces[1].page_bytes must be a multiple of 4, >= units_per_page * "
              "bytes = 2304, got " +
                  std::to_string(bytes));
  }
  EXPECT_EQ(after_piece([](Piece& p) { p.page_bytes = kHuge - 3; }),
            "[fetch] memory.pieces[1].page_bytes must be <= 922337203685477580 with 10 pages, got "
            "9223372036854775804");
  EXPECT_EQ(after_piece([](Piece& p) { p.arena = nullptr; }),
            "[fetch] memory.pieces[1].arena must point to 640 slots, got null");
  EXPECT_EQ(after_piece([](Piece& p) { p.arena = dummy + 1; }).substr(0, 63),
            "[fetch] memory.pieces[1].arena must be aligned to 4 bytes, got ");
}

TEST_F(GroupCheckTest, MovesMustLieWithinEveryGroup) {
  std::vector<ops::GroupMemory> groups{good_.memory, good_.memory};
  groups[1].num_slots = 128;
  groups[1].num_host_pages = 3;
  const auto error_for = [&](std::int64_t host_unit, std::int32_t slot) {
    const std::vector<ops::UnitMove> moves{{0, 0}, {host_unit, slot}};
    return error_of([&] { check(ops::MoveParams{moves, groups}); });
  };
  EXPECT_EQ(error_for(191, 127), "accepted");
  EXPECT_EQ(error_for(0, 128), "[move_units] moves[1].slot must be in [0, 128), got 128");
  EXPECT_EQ(error_for(0, -1), "[move_units] moves[1].slot must be in [0, 128), got -1");
  EXPECT_EQ(error_for(192, 0), "[move_units] moves[1].host_unit must be in [0, 192), got 192");
  EXPECT_EQ(error_for(-1, 0), "[move_units] moves[1].host_unit must be in [0, 192), got -1");
  groups[1].units_per_page = 0;
  EXPECT_EQ(error_for(0, 0), "[move_units] memory.units_per_page must be >= 1, got 0");
}

TEST(OpsCheckTest, ConvertNamesEachBadArgument) {
  using Params = ops::ConvertParams;
  Params good;
  good.slots = good.out32 = some<std::int32_t>();
  good.b = 2;
  good.k = 8;
  good.units_per_page = 64;
  good.page_stride = 64;
  good.unit_stride = 1;
  good.num_slots = 640;
  const auto after = [&](const std::function<void(Params&)>& edit) {
    return message_after(good, edit);
  };
  EXPECT_EQ(after([](Params&) {}), "accepted");
  EXPECT_EQ(after([](Params& p) { p.b = -1; }), "[convert] b must be >= 0, got -1");
  EXPECT_EQ(after([](Params& p) { p.k = 0; }), "[convert] k must be >= 1, got 0");
  EXPECT_EQ(after([](Params& p) { p.units_per_page = 0; }),
            "[convert] units_per_page must be >= 1, got 0");
  EXPECT_EQ(after([](Params& p) { p.num_slots = -1; }),
            "[convert] num_slots must be in [0, 2147483647], got -1");
  EXPECT_EQ(after([](Params& p) { p.slots = nullptr; }),
            "[convert] slots must point to 16 elements, got null");
  EXPECT_EQ(after([](Params& p) { p.out32 = nullptr; }),
            "[convert] out32 or out64 must point to 16 elements, got null");
  EXPECT_EQ(after([](Params& p) { p.out64 = some<std::int64_t>(); }),
            "[convert] out32 and out64 must not both be given, got two outputs");
}

TEST(OpsCheckTest, ConvertRefusesStridesWhoseIndicesDoNotFit) {
  using Params = ops::ConvertParams;
  Params good;
  good.slots = good.out32 = some<std::int32_t>();
  good.b = good.k = 1;
  good.units_per_page = 64;
  good.num_slots = 640;  // the last slot: page 9, offset 63
  const auto after = [&](const std::function<void(Params&)>& edit) {
    return message_after(good, edit);
  };
  EXPECT_EQ(after([](Params& p) { p.first = -1; }),
            "[convert] first must be in [0, 2147483647], got -1");
  EXPECT_EQ(after([](Params& p) { p.first = kMaxSlots + 1; }),
            "[convert] first must be in [0, 2147483647], got 2147483648");
  EXPECT_EQ(after([](Params& p) { p.page_stride = -1; }),
            "[convert] page_stride must be in [0, 238609294], got -1");
  EXPECT_EQ(after([](Params& p) { p.page_stride = 238'609'294; }), "accepted");
  EXPECT_EQ(after([](Params& p) { p.page_stride = 238'609'295; }),
            "[convert] page_stride must be in [0, 238609294], got 238609295");
  EXPECT_EQ(after([](Params& p) { p.unit_stride = 34'087'042; }), "accepted");
  EXPECT_EQ(after([](Params& p) { p.unit_stride = 34'087'043; }),
            "[convert] unit_stride must be in [0, 34087042], got 34087043");
  const auto to_64 = [](Params& p) {
    p.out32 = nullptr;
    p.out64 = some<std::int64_t>();
    p.page_stride = p.unit_stride = std::int64_t{1} << 40;
  };
  EXPECT_EQ(after(to_64), "accepted");
  EXPECT_EQ(after([&](Params& p) {
              to_64(p);
              p.unit_stride = kHuge / 63;
            }),
            "[convert] unit_stride must be in [0, 146402573670636917], got 146402730743726600");
}

TEST(OpsCheckTest, ConvertWithASelectionNeedsRowsAndErrors) {
  using Params = ops::ConvertParams;
  Params good;
  good.slots = good.out32 = some<std::int32_t>();
  good.b = 2;
  good.k = 8;
  good.units_per_page = 64;
  good.num_slots = 640;
  good.selection = some<std::int32_t>();
  good.selection_stride = 8;
  good.launch = good_launch();
  good.errors = good_errors();
  const auto after = [&](const std::function<void(Params&)>& edit) {
    return message_after(good, edit);
  };
  EXPECT_EQ(after([](Params&) {}), "accepted");
  EXPECT_EQ(after([](Params& p) { p.selection_stride = 7; }),
            "[convert] selection_stride must be >= k = 8, got 7");
  EXPECT_EQ(after([](Params& p) { p.launch.b = 3; }), "[convert] launch.b must be b = 2, got 3");
  EXPECT_EQ(after([](Params& p) { p.launch.rows = nullptr; }),
            "[convert] launch.rows must point to 2 elements, got null");
  EXPECT_EQ(after([](Params& p) { p.errors.errors = nullptr; }),
            "[convert] errors.errors must point to 2 elements, got null");
}

TEST(OpsCheckTest, ResetNamesEachBadArgument) {
  const auto error_for = [](std::int32_t lease_id, std::int32_t base, std::int32_t cached_slots) {
    const std::vector<ops::LeaseReset> leases{{lease_id, base, cached_slots}};
    const std::vector<Entry*> entries{some<Entry>()};
    const std::vector<std::uint32_t*> last{some<std::uint32_t>()};
    return error_of([&] { check(ops::ResetParams{leases, entries, last, 100, 4, 0}); });
  };
  EXPECT_EQ(error_for(3, 90, 10), "accepted");
  EXPECT_EQ(error_for(4, 0, 1), "[reset_leases] leases[0].lease_id must be in [0, 4), got 4");
  EXPECT_EQ(error_for(-1, 0, 1), "[reset_leases] leases[0].lease_id must be in [0, 4), got -1");
  EXPECT_EQ(error_for(0, 91, 10),
            "[reset_leases] leases[0].base must be in [0, 90] with 10 cached slots, got 91");
  EXPECT_EQ(error_for(0, -1, 10),
            "[reset_leases] leases[0].base must be in [0, 90] with 10 cached slots, got -1");
  EXPECT_EQ(error_for(0, 0, -1),
            "[reset_leases] leases[0].cached_slots must be in [0, 65535], got -1");
  EXPECT_EQ(error_for(0, 0, 65'536),
            "[reset_leases] leases[0].cached_slots must be in [0, 65535], got 65536");
}

TEST(OpsCheckTest, ResetNeedsBothArraysOfEveryGroup) {
  const std::vector<Entry*> entries{some<Entry>(), nullptr};
  const std::vector<std::uint32_t*> last{some<std::uint32_t>()};
  EXPECT_EQ(error_of([&] { check(ops::ResetParams{{}, entries, last, 100, 4, 0}); }),
            "[reset_leases] last must have one array per group, 2 as entries has, got 1");
  const std::vector<std::uint32_t*> two{last[0], last[0]};
  EXPECT_EQ(error_of([&] { check(ops::ResetParams{{}, entries, two, 100, 4, 0}); }),
            "[reset_leases] every array of entries must point to 100 elements, got null");
}

class RefusedCallTest : public DeviceTest {};
SPARSE_KVCM_ON_EVERY_DEVICE(RefusedCallTest);

TEST_P(RefusedCallTest, LeavesMemoryAlone) {
  const DeviceArray<Entry> entries(device(), 8, kPoisonWord);
  const DeviceArray<std::uint32_t> last(device(), 2, kPoisonWord);
  const std::vector<ops::LeaseReset> good_then_bad{{0, 0, 4}, {1, 5, 4}};
  const std::vector<Entry*> all_entries{entries.data()};
  const std::vector<std::uint32_t*> all_last{last.data()};
  EXPECT_THROW(ops::reset_leases(device(), {good_then_bad, all_entries, all_last, 8, 2, 1}, 0),
               InvalidArgument);
  expect_equal("entries", entries.download(), std::vector<Entry>(8, kPoisonWord));
  expect_equal("last", last.download(), std::vector<std::uint32_t>(2, kPoisonWord));
}

}  // namespace
}  // namespace sparse_kvcm::testing
