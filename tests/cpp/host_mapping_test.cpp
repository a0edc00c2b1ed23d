#include "core/host_mapping.hpp"

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "host_files.hpp"
#include "sparse_kvcm/error.hpp"

namespace sparse_kvcm::testing {
namespace {

constexpr std::size_t kSizes[] = {0, 1, 4095, 4096, 4097, kHugePage - 1, kHugePage, kHugePage + 1};
constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr std::size_t kManyPieces = 200 * kMiB + 5;  // touched by several threads
constexpr std::byte kPoison{0xA5};

struct Stop : std::runtime_error {
  Stop() : std::runtime_error("stop") {}
};

std::string error_of(std::size_t bytes) {
  try {
    HostMapping(bytes).fill({});
  } catch (const HostMemoryError& error) {
    return error.what();
  }
  return "";
}

TEST(HostMappingTest, MapsWholePagesOfItsSizeAndNoMore) {
  for (const std::size_t bytes : kSizes) {
    const std::size_t before = mapped_bytes();
    const HostMapping mapping(bytes);
    EXPECT_EQ(mapped_bytes() - before, whole_pages(bytes)) << bytes;
    EXPECT_EQ(mapping.bytes(), bytes);
    EXPECT_EQ(mapping.data() == nullptr, bytes == 0);
  }
}

TEST(HostMappingTest, BeginsAtAHugePageIfItIsAsLargeAsOne) {
  std::vector<std::unique_ptr<HostMapping>> mappings;
  for (int i = 0; i < 5; ++i) {
    for (const std::size_t bytes : {kHugePage, kHugePage + 1, 3 * kHugePage - 1}) {
      mappings.push_back(std::make_unique<HostMapping>(bytes));
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(mappings.back()->data()) % kHugePage, 0U);
    }
  }
}

TEST(HostMappingTest, IsZeroAfterFillAlsoWhereOthersWereBefore) {
  for (const std::size_t bytes : kSizes) {
    for (int round = 0; round < 3; ++round) {
      HostMapping mapping(bytes);
      mapping.fill({});
      const auto zeros = std::count(mapping.data(), mapping.data() + bytes, std::byte{0});
      ASSERT_EQ(static_cast<std::size_t>(zeros), bytes);
      std::fill_n(mapping.data(), bytes, kPoison);
    }
  }
}

TEST(HostMappingTest, IsInMemoryAfterFillAndNotBefore) {
  for (const std::size_t bytes : {std::size_t{1}, kHugePage + 1, kManyPieces}) {
    HostMapping mapping(bytes);
    EXPECT_EQ(resident_bytes(mapping.data(), bytes), 0U) << bytes;
    mapping.fill({});
    EXPECT_EQ(resident_bytes(mapping.data(), bytes), whole_pages(bytes)) << bytes;
  }
}

TEST(HostMappingTest, IsUnmappedWhenItGoes) {
  const std::size_t before = mapped_bytes();
  for (const std::size_t bytes : kSizes) {
    std::optional<HostMapping> mapping(std::in_place, bytes);
    mapping->fill({});
    mapping.reset();
    EXPECT_EQ(mapped_bytes(), before) << bytes;
  }
}

// --- progress ---

TEST(HostMappingTest, ProgressAscendsToTheTotalOnTheCallersThreadBehindTheTouch) {
  for (const std::size_t bytes : {std::size_t{1}, kHugePage + 1, kManyPieces}) {
    HostMapping mapping(bytes);
    std::int64_t last = 0;
    const auto caller = std::this_thread::get_id();
    mapping.fill([&](std::int64_t done, std::int64_t total) {
      EXPECT_GT(done, last);
      EXPECT_EQ(total, static_cast<std::int64_t>(bytes));
      EXPECT_EQ(std::this_thread::get_id(), caller);
      const auto size = static_cast<std::size_t>(done);
      EXPECT_EQ(resident_bytes(mapping.data(), size), whole_pages(size));
      last = done;
    });
    EXPECT_EQ(last, static_cast<std::int64_t>(bytes));
  }
}

TEST(HostMappingTest, NoBytesAreNoProgressAndNoWarning) {
  HostMapping mapping(0, 1023);
  mapping.fill([](std::int64_t, std::int64_t) { FAIL(); });
  EXPECT_TRUE(mapping.warnings().empty());
}

TEST(HostMappingTest, ProgressThatThrowsEndsTheFillAndLeavesNothing) {
  std::size_t before = 0;
  for (int round = 0; round < 20; ++round) {
    if (round == 1) before = mapped_bytes();  // threads leave stacks to their successors
    EXPECT_THROW(HostMapping(kManyPieces).fill([](std::int64_t, std::int64_t) { throw Stop(); }),
                 Stop);
  }
  EXPECT_LT(mapped_bytes(), before + kManyPieces);
}

// --- huge pages ---

TEST(HostMappingTest, AsksForHugePagesUnlessTheEnvironmentOptsOut) {
  if (!std::filesystem::exists("/sys/kernel/mm/transparent_hugepage")) {
    GTEST_SKIP() << "this kernel has no transparent huge pages";
  }
  const std::vector<std::pair<const char*, const char*>> wishes{
      {nullptr, " hg "}, {"1", " hg "}, {"", " hg "}, {"0", " nh "}};
  for (const auto& [value, flag] : wishes) {
    const Environment environment(value);
    const HostMapping mapping(kHugePage);
    EXPECT_NE(vm_flags(mapping.data()).find(flag), std::string::npos)
        << vm_flags(mapping.data()) << "lacks" << flag;
    EXPECT_TRUE(mapping.warnings().empty());
  }
}

// --- fork ---

TEST(HostMappingTest, KeptFromChildrenIsNotCopiedOnForkAndNotUnmappedThere) {
  auto mapping = std::make_unique<HostMapping>(kHugePage);
  EXPECT_EQ(vm_flags(mapping->data()).find(" dc "), std::string::npos);
  mapping->keep_from_children();
  EXPECT_NE(vm_flags(mapping->data()).find(" dc "), std::string::npos);
  std::byte* const data = mapping->data();
  const pid_t child = fork();
  if (child == 0) {  // puts something else at the address, then destroys the mapping
    const void* const other = mmap(data, kHugePage, PROT_READ | PROT_WRITE,
                                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    if (other != data) _exit(2);
    mapping.reset();
    *data = std::byte{1};  // ends the child by a signal if it is gone
    _exit(0);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status)) << status;
  EXPECT_EQ(WEXITSTATUS(status), 0);
  *data = std::byte{1};  // still the parent's
}

TEST(HostMappingTest, WarnsOfAnEnvironmentThatItDoesNotUnderstand) {
  const Environment environment("off");
  const HostMapping mapping(1);
  ASSERT_EQ(mapping.warnings().size(), 1U);
  EXPECT_EQ(mapping.warnings()[0],
            "[SPARSE_KVCM_THP] must be 0 or 1, got \"off\"; huge pages are asked for");
}

// --- NUMA ---

TEST(HostMappingTest, WarnsOfANodeThatCannotBeHadAndGivesTheMemory) {
  constexpr int kNoSuchNode = 1023;
  HostMapping mapping(kHugePage, kNoSuchNode);
  mapping.fill({});
  ASSERT_EQ(mapping.warnings().size(), 1U);
  const std::string& warning = mapping.warnings()[0];
  EXPECT_NE(warning.find("NUMA node 1023 (mbind: "), std::string::npos) << warning;
  EXPECT_EQ(resident_bytes(mapping.data(), kHugePage), kHugePage);
}

TEST(HostMappingTest, FindsItsPagesOnTheNodeThatItPrefers) {
  HostMapping mapping(kHugePage, 0);
  if (const int error = prefer_node(mapping.data(), kHugePage, 0)) {
    GTEST_SKIP() << "mbind: " << std::strerror(error);
  }
  mapping.fill({});
  EXPECT_EQ(is_on_node(mapping.data(), kHugePage, 0), true);
  EXPECT_TRUE(mapping.warnings().empty());
  EXPECT_EQ(is_on_node(mapping.data(), kHugePage, 1), false);
}

// --- limits ---

TEST(HostMappingTest, RefusesWhatTheMachineDoesNotHaveBeforeItMapsAnything) {
  EXPECT_NE(error_of(std::size_t{1} << 50),
            "");  // whatever the first call maps for itself is there
  const std::size_t before = mapped_bytes();
  const std::string text = error_of(std::size_t{1} << 50);
  EXPECT_NE(text.find(" 1125899906842624 B are wanted"), std::string::npos) << text;
  EXPECT_TRUE(text.find("MemAvailable") != std::string::npos ||
              text.find("control group") != std::string::npos)
      << text;
  EXPECT_NE(error_of(~std::size_t{0}), "");
  EXPECT_EQ(mapped_bytes(), before);
}

TEST(HostMappingTest, NamesTheAddressSpaceLimit) {
  EXPECT_EQ(error_of(1), "");  // whatever the first call maps for itself is there
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_AS, &before), 0);
  rlimit tight = before;
  tight.rlim_cur = mapped_bytes() + 16 * kMiB;
  ASSERT_EQ(setrlimit(RLIMIT_AS, &tight), 0);
  const std::string text = error_of(32 * kMiB);
  const std::string fits = error_of(8 * kMiB);
  ASSERT_EQ(setrlimit(RLIMIT_AS, &before), 0);
  EXPECT_NE(text.find("RLIMIT_AS (ulimit -v) is " + std::to_string(tight.rlim_cur) + " B"),
            std::string::npos)
      << text;
  EXPECT_EQ(fits, "");
  EXPECT_EQ(error_of(32 * kMiB), "");
}

}  // namespace
}  // namespace sparse_kvcm::testing
