#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "ops_fixture.hpp"

namespace sparse_kvcm::testing {
namespace {

constexpr std::int32_t kMin = std::numeric_limits<std::int32_t>::min();
constexpr std::int32_t kMax = std::numeric_limits<std::int32_t>::max();

struct ConvertInput {
  std::vector<std::int32_t> slots = {};
  std::int32_t b = 1;
  std::int32_t k = 1;
  std::int32_t units_per_page = 1;
  std::int64_t page_stride = 1;
  std::int64_t unit_stride = 1;
  std::int64_t first = 0;
  std::int64_t num_slots = 1000;
  std::vector<std::int32_t> selection = {};  // empty = no check
  std::int32_t stride = 1;
  std::vector<std::int32_t> rows = {};
  std::vector<RowState> row_states = {};
};

struct ConvertResult {
  std::vector<std::int64_t> indices;
  std::vector<std::uint32_t> errors, row_errors, batch_error;
};

// Out is std::int32_t or std::int64_t. Error words begin with a bit that convert never sets.
template <class Out>
ConvertResult convert_on(Device device, const ConvertInput& input) {
  const DeviceArray slots(device, input.slots), selection(device, input.selection);
  const DeviceArray rows(device, input.rows);
  const DeviceArray row_states(device, input.row_states);
  const DeviceArray<Out> out(device, input.slots.size(), static_cast<Out>(kPoison));
  const DeviceArray<std::uint32_t> errors(device, static_cast<std::size_t>(input.b), kErrorStale);
  const DeviceArray<std::uint32_t> row_errors(device, input.row_states.size(), kErrorStale);
  const DeviceArray<std::uint32_t> batch_error(device, 1, 1u << 7);

  ops::ConvertParams params;
  params.slots = slots.data();
  params.b = input.b;
  params.k = input.k;
  params.units_per_page = input.units_per_page;
  params.page_stride = input.page_stride;
  params.unit_stride = input.unit_stride;
  params.first = input.first;
  if constexpr (sizeof(Out) == 4) params.out32 = out.data();
  if constexpr (sizeof(Out) == 8) params.out64 = out.data();
  params.num_slots = input.num_slots;
  params.errors = {errors.data(), row_errors.data(), batch_error.data()};
  if (!input.selection.empty()) {
    params.selection = selection.data();
    params.selection_stride = input.stride;
    params.launch = {rows.data(), input.b, row_states.data(),
                     static_cast<std::int32_t>(input.row_states.size())};
  }
  ops::convert(device, params, 0);
  const std::vector<Out> indices = out.download();
  return {{indices.begin(), indices.end()},
          errors.download(),
          row_errors.download(),
          batch_error.download()};
}

class ConvertTest : public DeviceTest {
 protected:
  ConvertResult to_32(const ConvertInput& input) {
    return convert_on<std::int32_t>(device(), input);
  }
  ConvertResult to_64(const ConvertInput& input) {
    return convert_on<std::int64_t>(device(), input);
  }
};
SPARSE_KVCM_ON_EVERY_DEVICE(ConvertTest);

TEST_P(ConvertTest, FlatFormIsTheSlotItself) {
  for (const std::int32_t page : {1, 2, 61, 64}) {
    const ConvertInput input{.slots = {0, page - 1, page, page + 1, 2 * page, 999, -1},
                             .k = 7,
                             .units_per_page = page,
                             .page_stride = page};
    const std::vector<std::int64_t> expected(input.slots.begin(), input.slots.end());
    EXPECT_EQ(to_32(input).indices, expected) << page;
    EXPECT_EQ(to_64(input).indices, expected) << page;
  }
}

TEST_P(ConvertTest, StridesPlacePagesAndUnits) {
  const ConvertInput input{.slots = {0, 1, 60, 61, 62, -1, 122},
                           .k = 7,
                           .units_per_page = 61,
                           .page_stride = 10'000,
                           .unit_stride = 7,
                           .first = 5};
  const std::vector<std::int64_t> expected{5, 12, 425, 10'005, 10'012, -1, 20'005};
  EXPECT_EQ(to_32(input).indices, expected);
  EXPECT_EQ(to_64(input).indices, expected);
}

TEST_P(ConvertTest, ByteOffsetsMayPassFourGigabytes) {
  const ConvertInput input{.slots = {kMax - 1},
                           .units_per_page = 64,
                           .page_stride = 36'864,
                           .unit_stride = 576,
                           .num_slots = kMax};
  EXPECT_EQ(to_64(input).indices[0], std::int64_t{33'554'431} * 36'864 + 62 * 576);
}

TEST_P(ConvertTest, LargestIndexOf32BitsIsAccepted) {
  const ConvertInput input{.slots = {1}, .first = kMax - 999};
  EXPECT_EQ(to_32(input).indices[0], kMax - 998);
}

TEST_P(ConvertTest, SlotsThatAreNoSlotsGiveMinusOneAndLease) {
  for (const std::int32_t bad : {-2, 1000, 1001, kMin, kMax}) {
    const ConvertInput input{.slots = {7, bad, -1, 8}, .b = 2, .k = 2};
    const ConvertResult result = to_32(input);
    EXPECT_EQ(result.indices, (std::vector<std::int64_t>{7, -1, -1, 8})) << bad;
    EXPECT_EQ(result.errors, (std::vector<std::uint32_t>{kErrorLease | kErrorStale, kErrorStale}));
    EXPECT_EQ(to_64(input).errors, result.errors);
    EXPECT_EQ(result.batch_error[0], 1u << 7);
  }
}

TEST_P(ConvertTest, SelectedUnitWithoutASlotGivesUncovered) {
  ConvertInput input{.slots = {4, 5, -1, 6},
                     .k = 4,
                     .selection = {0, 9, 0, 9},
                     .stride = 4,
                     .rows = {1},
                     .row_states = {{.lease_id = 0, .length = 10}, {.lease_id = 1, .length = 10}}};
  const auto error_for = [&](std::int32_t ordinal) {
    input.selection[2] = ordinal;
    const ConvertResult result = to_32(input);
    EXPECT_EQ(result.indices, (std::vector<std::int64_t>{4, 5, -1, 6}));
    EXPECT_EQ(result.row_errors, (std::vector<std::uint32_t>{kErrorStale, result.errors[0]}));
    return result.errors[0];
  };
  EXPECT_EQ(error_for(0), kErrorUncovered | kErrorStale);
  EXPECT_EQ(error_for(9), kErrorUncovered | kErrorStale);
  for (const std::int32_t not_a_unit : {-1, -2, 10, kMin, kMax}) {
    EXPECT_EQ(error_for(not_a_unit), kErrorStale) << not_a_unit;
  }
}

TEST_P(ConvertTest, CoverageIsCheckedForSeatedRowsAloneAndThroughTheStride) {
  const ConvertInput input{.slots = {-1, 1, -1, 2, -1, 3, -1, 4},
                           .b = 4,
                           .k = 2,
                           .selection = {5, 6, 0, 5, 6, 0, 5, 6, 0, -1, 6, 5},
                           .stride = 3,
                           .rows = {-1, 1, 7, 0},
                           .row_states = {{.lease_id = 0, .length = 10}, {}}};
  const ConvertResult result = to_64(input);
  EXPECT_EQ(result.indices, (std::vector<std::int64_t>{-1, 1, -1, 2, -1, 3, -1, 4}));
  EXPECT_EQ(result.errors, std::vector<std::uint32_t>(4, kErrorStale));
  EXPECT_EQ(result.batch_error[0], kBatchErrorRow | 1u << 7);
}

TEST_P(ConvertTest, ErrorWordsMayBeMissingWithoutASelection) {
  const DeviceArray slots(device(), std::vector{1, 5000, -1});
  const DeviceArray<std::int32_t> out(device(), 3, kPoison);
  ops::ConvertParams params;
  params.slots = slots.data();
  params.b = 3;
  params.k = 1;
  params.units_per_page = 2;
  params.page_stride = 20;
  params.unit_stride = 3;
  params.out32 = out.data();
  params.num_slots = 5000;
  ops::convert(device(), params, 0);
  EXPECT_EQ(out.download(), (std::vector{3, -1, -1}));
}

TEST_P(ConvertTest, EmptyLaunchIsANoOp) { EXPECT_TRUE(to_32({.b = 0}).indices.empty()); }

}  // namespace
}  // namespace sparse_kvcm::testing
