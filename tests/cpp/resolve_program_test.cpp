// resolve against its oracle over random programs of steps.
#include <gtest/gtest.h>

#include <vector>

#include "resolve_oracle.hpp"
#include "resolve_program.hpp"

namespace sparse_kvcm::testing {
namespace {

class ResolveProgramTest : public DeviceTest {};
SPARSE_KVCM_ON_EVERY_DEVICE(ResolveProgramTest);

// The widths of block that a launch may ask for.
constexpr std::int32_t kAllThreads[] = {0, 256, 512};

TEST_P(ResolveProgramTest, AgreesWithTheOracleOverRandomPrograms) {
  for (std::int64_t seed = 0; seed < programs_to_run(300); ++seed) {
    ResolveProgram program(static_cast<std::uint64_t>(seed), Scale::kSmall);
    for (int launch = 0; launch < 40; ++launch) {
      SCOPED_TRACE(::testing::Message() << "seed " << seed << ", launch " << launch);
      const ResolveInput& input = program.next_launch();
      const ResolveResult expected = expected_resolve(input);
      const std::int32_t threads = kAllThreads[launch % 3];
      ASSERT_NO_FATAL_FAILURE(expect_same(resolve_on(device(), input, threads), expected));
      program.carry_over(expected);
    }
  }
}

// 2,000 launches, on a GPU in every width of block from the same state.
TEST_P(ResolveProgramTest, EveryWidthOfBlockGivesTheBytesOfTheOracleAtTheSizesOfModels) {
  for (std::int64_t seed = 0; seed < programs_to_run(125); ++seed) {
    ResolveProgram program(static_cast<std::uint64_t>(seed), Scale::kWide);
    for (int launch = 0; launch < 16; ++launch) {
      const ResolveInput& input = program.next_launch();
      const ResolveResult expected = expected_resolve(input);
      for (const std::int32_t threads : kAllThreads) {
        SCOPED_TRACE(::testing::Message()
                     << "seed " << seed << ", launch " << launch << ", threads " << threads
                     << ", k " << input.k << ", max_units " << input.max_units);
        ASSERT_NO_FATAL_FAILURE(expect_same(resolve_on(device(), input, threads), expected));
        if (GetParam() == DeviceKind::kCpu) break;  // threads are a GPU's
      }
      program.carry_over(expected);
    }
  }
}

TEST_P(ResolveProgramTest, PermutingASelectionPermutesItsSlotsAndChangesNothingElse) {
  for (std::int64_t seed = 1000; seed < 1000 + programs_to_run(100); ++seed) {
    ResolveProgram program(static_cast<std::uint64_t>(seed), Scale::kSmall);
    for (int launch = 0; launch < 10; ++launch) {
      SCOPED_TRACE(::testing::Message() << "seed " << seed << ", launch " << launch);
      const ResolveInput& input = program.next_launch();
      ResolveResult expected = resolve_on(device(), input);

      std::vector<std::size_t> order(static_cast<std::size_t>(input.k));
      for (std::size_t j = 0; j < order.size(); ++j) order[j] = j;
      program.random().shuffle(order);
      ResolveInput permuted = input;
      ResolveResult permuted_back = expected;
      for (std::size_t i = 0; i < input.b(); ++i) {
        for (std::size_t j = 0; j < order.size(); ++j) {
          permuted.selection[i * static_cast<std::size_t>(input.stride) + j] =
              input.selected(i, static_cast<std::int32_t>(order[j]));
          permuted_back.slots[i * order.size() + j] = expected.slots[i * order.size() + order[j]];
        }
      }
      ASSERT_NO_FATAL_FAILURE(expect_same(resolve_on(device(), permuted), permuted_back));
      program.carry_over(expected);
    }
  }
}

}  // namespace
}  // namespace sparse_kvcm::testing
