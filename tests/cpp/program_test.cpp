// 10,000 random programs without a wrong byte; on a GPU the first 2,000 of them. See
// program_driver.hpp.
//
// SPARSE_KVCM_PROGRAM_SEED runs the program of one seed alone, SPARSE_KVCM_PROGRAM_COUNT so many
// programs, from that seed on or from 1. A failing program prints its calls.
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <optional>
#include <string>

#include "program_driver.hpp"
#include "test_device.hpp"

namespace sparse_kvcm::testing {
namespace {

constexpr std::int64_t kPrograms = 10'000;
constexpr std::int64_t kProgramsOnGpu = 2'000;

std::optional<std::uint64_t> number_from_environment(const char* name) {
  const char* text = std::getenv(name);
  if (text == nullptr) return std::nullopt;
  return std::stoull(text);
}

struct Outcome {
  ProgramCounts counts;
  std::int64_t failed = 0;
  std::string first_failure;                  // with the calls that led to it
  std::map<std::string, std::int64_t> kinds;  // of failures
};

std::string traced(Device device, std::uint64_t seed) {
  const ProgramResult result = Program({device, seed, Sabotage::kNothing, true}).run();
  return result.trace + "=> " + result.failure +
         "\nSPARSE_KVCM_PROGRAM_SEED=" + std::to_string(seed) + '\n';
}

Outcome run_programs(Device device, std::uint64_t first_seed, std::int64_t count) {
  Outcome outcome;
  for (std::int64_t n = 0; n < count; ++n) {
    const std::uint64_t seed = first_seed + static_cast<std::uint64_t>(n);
    Program program({device, seed, Sabotage::kNothing, false});
    const ProgramResult result = program.run();
    outcome.counts.add(program.counts());
    if (result.failure.empty()) continue;
    ++outcome.kinds[result.failure];
    if (outcome.failed++ == 0) outcome.first_failure = traced(device, seed);
  }
  return outcome;
}

class ProgramTest : public DeviceTest {};
SPARSE_KVCM_ON_EVERY_DEVICE(ProgramTest);

TEST_P(ProgramTest, ProgramsReadNoWrongByteAndReachEverySituation) {
  const auto seed = number_from_environment("SPARSE_KVCM_PROGRAM_SEED");
  const auto count = number_from_environment("SPARSE_KVCM_PROGRAM_COUNT");
  const bool on_cpu = GetParam() == DeviceKind::kCpu;
  std::int64_t programs = seed ? 1 : programs_to_run(on_cpu ? kPrograms : kProgramsOnGpu);
  if (count) programs = static_cast<std::int64_t>(*count);
  const Outcome outcome = run_programs(device(), seed.value_or(1), programs);
  EXPECT_EQ(outcome.failed, 0) << "of " << programs << " programs; the first:\n"
                               << outcome.first_failure;
  for (const auto& [failure, times] : outcome.kinds)
    ADD_FAILURE() << times << " programs: " << failure;
  if (programs < kPrograms) return;
  for (std::size_t s = 0; s < outcome.counts.seen.size(); ++s)
    EXPECT_GE(outcome.counts.seen[s], 100) << "too rare: " << name_of(static_cast<Situation>(s));
}

// The test that can fail: a client with one fault is caught. Not in every program, since what a
// failed step wrote is never read.
class FaultyClientTest : public ::testing::TestWithParam<Sabotage> {};

TEST_P(FaultyClientTest, IsCaught) {
  std::int64_t programs_with_fault = 0;
  std::int64_t caught = 0;
  for (std::uint64_t seed = 1; seed <= 100; ++seed) {
    Program program({{}, seed, GetParam(), false});
    const ProgramResult result = program.run();
    if (program.counts().sabotaged == 0) continue;
    ++programs_with_fault;
    caught += result.failure.empty() ? 0 : 1;
  }
  EXPECT_GE(programs_with_fault, 30);
  EXPECT_GE(caught, programs_with_fault * 9 / 10);
}

std::string fault_name(const ::testing::TestParamInfo<Sabotage>& info) {
  switch (info.param) {
    case Sabotage::kSkipMiss:
      return "SkipsAMiss";
    case Sabotage::kWrongWriteSlot:
      return "WritesToAWrongSlot";
    case Sabotage::kLeaderOnly:
      return "WritesTheLeaderOnly";
    case Sabotage::kForgetWrite:
      return "ForgetsToWrite";
    case Sabotage::kNothing:
      break;
  }
  return "Nothing";
}

INSTANTIATE_TEST_SUITE_P(Client, FaultyClientTest,
                         ::testing::Values(Sabotage::kSkipMiss, Sabotage::kWrongWriteSlot,
                                           Sabotage::kLeaderOnly, Sabotage::kForgetWrite),
                         fault_name);

}  // namespace
}  // namespace sparse_kvcm::testing
