#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <numeric>
#include <vector>

#include "group_fixture.hpp"

namespace sparse_kvcm::testing {
namespace {

constexpr std::int32_t kMin = std::numeric_limits<std::int32_t>::min();
constexpr std::int32_t kMax = std::numeric_limits<std::int32_t>::max();

struct FetchInput {
  std::vector<std::int32_t> rows;
  std::vector<RowState> row_states;
  std::vector<std::int32_t> miss_ordinals, miss_slots, miss_counts;
  std::int32_t k = 1;
  std::vector<std::int32_t> page_table;
  std::int64_t max_pages = 1;
  std::vector<StepState> step;      // none or one
  std::uint32_t* cursor = nullptr;  // of the device
};

struct FetchErrors {
  std::vector<std::uint32_t> errors, row_errors, batch_error;
};

// The words begin with a bit that fetch never sets, unless it is given a step.
FetchErrors fetch_on(Device device, const FetchInput& input, const ops::GroupMemory& memory) {
  const DeviceArray rows(device, input.rows);
  const DeviceArray row_states(device, input.row_states);
  const DeviceArray miss_ordinals(device, input.miss_ordinals);
  const DeviceArray miss_slots(device, input.miss_slots);
  const DeviceArray miss_counts(device, input.miss_counts);
  const DeviceArray page_table(device, input.page_table);
  const DeviceArray step(device, input.step);
  const DeviceArray<std::uint32_t> errors(device, input.rows.size(), kErrorStale);
  const DeviceArray<std::uint32_t> row_errors(device, input.row_states.size(), kErrorUncovered);
  const DeviceArray<std::uint32_t> batch_error(device, 1, 1u << 7);
  ops::FetchParams params;
  params.launch = {rows.data(), static_cast<std::int32_t>(input.rows.size()), row_states.data(),
                   static_cast<std::int32_t>(input.row_states.size())};
  params.step = input.step.empty() ? nullptr : step.data();
  params.miss_ordinals = miss_ordinals.data();
  params.miss_slots = miss_slots.data();
  params.miss_counts = miss_counts.data();
  params.k = input.k;
  params.page_table = page_table.data();
  params.max_pages = input.max_pages;
  params.memory = memory;
  params.errors = {errors.data(), row_errors.data(), batch_error.data()};
  params.cursor = input.cursor;
  ops::fetch(device, params, 0);
  return {errors.download(), row_errors.download(), batch_error.download()};
}

class FetchTest : public DeviceTest {
 protected:
  // Four rows of seven pages each, on shuffled host pages; unit o of row r bears tag r * 10^6 + o.
  static constexpr std::int32_t kRows = 4;
  static constexpr std::int32_t kPages = 7;

  void seat(TestGroup& group, std::int32_t watermark) {
    input_.max_pages = kPages;
    input_.page_table.resize(kRows * kPages);
    std::iota(input_.page_table.begin(), input_.page_table.end(), 1);  // page 0 is nobody's
    random_.shuffle(input_.page_table);
    for (std::int32_t r = 0; r < kRows; ++r) {
      input_.row_states.push_back({.lease_id = r, .watermark = watermark});
      for (std::int32_t o = 0; o < kPages * group.units_per_page(); ++o) {
        group.tag_host(host_unit(group, r, o), unit(r, o));
      }
    }
  }

  [[nodiscard]] std::int64_t host_unit(const TestGroup& group, std::int32_t r,
                                       std::int32_t o) const {
    const auto cell = static_cast<std::size_t>(r * kPages + o / group.units_per_page());
    return std::int64_t{input_.page_table[cell]} * group.units_per_page() +
           o % group.units_per_page();
  }
  static std::int64_t unit(std::int32_t r, std::int32_t o) {
    return std::int64_t{r} * 1'000'000 + o;
  }

  // One launch position's misses. Cells past them are poison.
  void launch(std::int32_t row, std::vector<std::int32_t> ordinals,
              std::vector<std::int32_t> slots) {
    input_.rows.push_back(row);
    input_.miss_counts.push_back(static_cast<std::int32_t>(ordinals.size()));
    ordinals.resize(static_cast<std::size_t>(input_.k), kPoison);
    slots.resize(static_cast<std::size_t>(input_.k), kPoison);
    input_.miss_ordinals.insert(input_.miss_ordinals.end(), ordinals.begin(), ordinals.end());
    input_.miss_slots.insert(input_.miss_slots.end(), slots.begin(), slots.end());
  }

  static GroupShape small_shape() {
    return {.layout = UnitLayout({288, 36}),
            .num_members = 2,
            .units_per_page = 2,
            .num_slots = 9,
            .num_host_pages = kRows * kPages + 1};
  }

  // Launches row 2 with these misses, of which only those at `copied` may arrive.
  void expect_error(std::uint32_t error, std::vector<std::int32_t> ordinals,
                    std::vector<std::int32_t> slots, const std::vector<std::size_t>& copied) {
    TestGroup group(device(), small_shape());
    input_.k = 4;
    seat(group, 12);
    if (edit_) edit_(input_);
    launch(2, ordinals, slots);
    group.upload();
    for (const std::size_t i : copied) group.tag_arena(slots[i], unit(2, ordinals[i]));
    const FetchErrors errors = fetch_on(device(), input_, group.memory());
    group.expect_as_modelled();
    EXPECT_EQ(errors.errors, (std::vector{error | kErrorStale}));
    EXPECT_EQ(errors.row_errors[2], error | kErrorUncovered);
    EXPECT_EQ(errors.row_errors[1], kErrorUncovered);
    EXPECT_EQ(errors.batch_error[0], 1u << 7);
    input_ = {};
  }

  Random random_{7};
  FetchInput input_;
  std::function<void(FetchInput&)> edit_;
};
SPARSE_KVCM_ON_EVERY_DEVICE(FetchTest);

TEST_P(FetchTest, EveryByteOfEveryMissArrivesAndNoOtherByteMoves) {
  const DeviceArray<std::uint32_t> cursor(device(), 2, 0);
  for (const UnitLayout& layout : all_layouts()) {
    for (const std::int32_t page : all_page_sizes()) {
      const GroupShape shape{layout, random_.in(1, 4), page, 3 * page + 40, kRows * kPages + 1};
      SCOPED_TRACE(describe(shape));
      TestGroup group(device(), shape);
      input_ = {};
      if (random_.one_in(2)) input_.cursor = cursor.data();
      input_.k = 10;
      seat(group, kPages * page);
      std::vector<std::int32_t> free_slots(static_cast<std::size_t>(shape.num_slots));
      std::iota(free_slots.begin(), free_slots.end(), 0);
      random_.shuffle(free_slots);
      std::vector<std::pair<std::int32_t, std::int64_t>> arriving;
      for (const std::int32_t row : {2, -1, 0, 3}) {
        // Page edges, the last unit, and some others; -1 is padding with poison as its misses.
        const std::vector<std::int32_t> ordinals{0,
                                                 page - 1,
                                                 page,
                                                 2 * page - 1,
                                                 2 * page,
                                                 kPages * page - 1,
                                                 random_.in(0, 7 * page - 1)};
        std::vector<std::int32_t> slots;
        for (const std::int32_t ordinal : ordinals) {
          slots.push_back(free_slots.back());
          if (row >= 0) arriving.emplace_back(free_slots.back(), unit(row, ordinal));
          free_slots.pop_back();
        }
        launch(row, ordinals, slots);
      }
      group.upload();
      for (const auto& [slot, arrived] : arriving) group.tag_arena(slot, arrived);
      const FetchErrors errors = fetch_on(device(), input_, group.memory());
      ASSERT_NO_FATAL_FAILURE(group.expect_as_modelled());
      EXPECT_EQ(errors.errors, std::vector<std::uint32_t>(4, kErrorStale));
      EXPECT_EQ(errors.batch_error[0], 1u << 7);
    }
  }
}

TEST_P(FetchTest, NothingAtOrAboveTheWatermarkIsRead) {
  expect_error(kErrorHole, {11, 12, 5}, {3, 4, 5}, {0, 2});
  expect_error(kErrorHole, {13, 0}, {3, 4}, {1});
  expect_error(kErrorHole, {kMax, 0}, {3, 4}, {1});
}

TEST_P(FetchTest, NegativeOrdinalGivesRange) {
  expect_error(kErrorRange, {-1, 0}, {3, 4}, {1});
  expect_error(kErrorRange, {kMin, 0}, {3, 4}, {1});
}

TEST_P(FetchTest, SlotOutsideTheArenaGivesLease) {
  for (const std::int32_t slot : {-1, 9, kMin, kMax}) {
    expect_error(kErrorLease, {6, 7}, {slot, 4}, {1});
  }
}

TEST_P(FetchTest, MissWithoutAPageGivesPage) {
  for (const std::int32_t page : {-1, -2, kRows * kPages + 1, kMin, kMax}) {
    edit_ = [=](FetchInput& input) { input.page_table[2 * kPages + 3] = page; };
    expect_error(kErrorPage, {5, 6, 7, 8}, {3, 4, 5, 6}, {0, 3});
  }
}

TEST_P(FetchTest, MissPastThePageTableGivesPage) {
  edit_ = [](FetchInput& input) { input.row_states[2].watermark = kMax; };
  expect_error(kErrorPage, {2 * kPages - 1, 2 * kPages}, {3, 4}, {0});
  expect_error(kErrorPage, {kMax - 1, 0}, {3, 4}, {1});
}

TEST_P(FetchTest, FaultsOfOneRowAreOred) {
  expect_error(kErrorHole | kErrorRange | kErrorLease, {12, -1, 3, 4}, {3, 4, 9, 6}, {3});
}

TEST_P(FetchTest, FirstFaultOfAMissIsTheOneReported) {
  expect_error(kErrorHole, {12, 0}, {-1, 4}, {1});
  edit_ = [](FetchInput& input) { input.page_table[2 * kPages] = -1; };
  expect_error(kErrorLease, {0, 2}, {-1, 4}, {1});
}

TEST_P(FetchTest, CountsAreClampedToTheShape) {
  TestGroup group(device(), small_shape());
  input_.k = 2;
  seat(group, 12);
  launch(0, {1, 2}, {0, 1});
  launch(1, {3, 4}, {2, 3});
  input_.miss_counts = {kMax, kMin};
  group.upload();
  group.tag_arena(0, unit(0, 1));
  group.tag_arena(1, unit(0, 2));
  EXPECT_EQ(fetch_on(device(), input_, group.memory()).errors,
            std::vector<std::uint32_t>(2, kErrorStale));
  group.expect_as_modelled();
}

TEST_P(FetchTest, RowsThatAreNotSeatedAreSkippedWithABatchError) {
  for (const std::int32_t row : {1, kRows, -2, kMin, kMax}) {
    TestGroup group(device(), small_shape());
    input_ = {};
    input_.k = 1;
    seat(group, 12);
    input_.row_states[1].lease_id = -1;
    launch(row, {3}, {4});
    launch(0, {3}, {5});
    group.upload();
    group.tag_arena(5, unit(0, 3));
    const FetchErrors errors = fetch_on(device(), input_, group.memory());
    group.expect_as_modelled();
    EXPECT_EQ(errors.errors, std::vector<std::uint32_t>(2, kErrorStale)) << row;
    EXPECT_EQ(errors.batch_error[0], kBatchErrorRow | 1u << 7) << row;
  }
}

TEST_P(FetchTest, ClosedStepGivesStaleAndCopiesNothing) {
  for (const std::uint32_t open : {0u, 1u}) {
    TestGroup group(device(), small_shape());
    input_ = {};
    seat(group, 12);
    input_.step = {{.clock = 7, .open = open}};
    launch(0, {3}, {5});
    launch(kPaddingRow, {3}, {6});
    group.upload();
    if (open == 1) group.tag_arena(5, unit(0, 3));
    const FetchErrors errors = fetch_on(device(), input_, group.memory());
    group.expect_as_modelled();
    const std::uint32_t expected = open == 1 ? kErrorUncovered : kErrorUncovered | kErrorStale;
    EXPECT_EQ(errors.row_errors[0], expected);
    EXPECT_EQ(errors.row_errors[1], kErrorUncovered);
  }
}

// Lists that a GPU's warps walk more than once, of fewer and of more rows than it numbers at a
// time, one after the other with one cursor, and without.
TEST_P(FetchTest, LongListsArriveOneAfterTheOtherWithOneCursor) {
  const DeviceArray<std::uint32_t> cursor(device(), 2, 0);
  for (const std::int32_t rows : {300, 2'048, 301, 4'500, 4'501}) {
    SCOPED_TRACE(rows);
    TestGroup group(device(), {.layout = UnitLayout({16}),
                               .num_members = 1,
                               .units_per_page = 4,
                               .num_slots = 4 * rows,
                               .num_host_pages = rows});
    input_ = {};
    input_.cursor = rows == 4'500 ? nullptr : cursor.data();
    input_.k = 4;
    for (std::int32_t r = 0; r < rows; ++r) {
      input_.row_states.push_back({.lease_id = r, .watermark = 4});
      input_.page_table.push_back(rows - 1 - r);
      for (std::int32_t o = 0; o < 4; ++o) group.tag_host(4 * (rows - 1 - r) + o, unit(r, o));
      const std::vector<std::int32_t> ordinals{0, 1, 2, 3};
      launch(r, {ordinals.begin(), ordinals.begin() + r % 5},
             {4 * r, 4 * r + 2, 4 * r + 1, 4 * r + 3});
    }
    group.upload();
    for (std::int32_t r = 0; r < rows; ++r) {
      for (std::int32_t m = 0; m < r % 5; ++m) {
        group.tag_arena(input_.miss_slots[static_cast<std::size_t>(4 * r + m)], unit(r, m));
      }
    }
    const FetchErrors errors = fetch_on(device(), input_, group.memory());
    ASSERT_NO_FATAL_FAILURE(group.expect_as_modelled());
    EXPECT_EQ(errors.errors, std::vector<std::uint32_t>(input_.rows.size(), kErrorStale));
    EXPECT_EQ(cursor.download(), std::vector<std::uint32_t>(2, 0));
  }
}

TEST_P(FetchTest, EmptyLaunchIsANoOp) {
  TestGroup group(device(), small_shape());
  seat(group, 12);
  group.upload();
  fetch_on(device(), input_, group.memory());
  group.expect_as_modelled();
}

}  // namespace
}  // namespace sparse_kvcm::testing
