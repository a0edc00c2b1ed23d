// Limits are read from made-up trees; messages name the one that stands in the way.
#include "core/host_limits.hpp"

#include "core/numa.hpp"
#include "host_files.hpp"
#include "sparse_kvcm/error.hpp"

namespace sparse_kvcm::testing {
namespace {

constexpr std::int64_t kMiB = 1 << 20;

class HostLimitsTest : public ::testing::Test {
 protected:
  // A group of version 2; `limit` may be "max".
  void group2(const std::string& path, const std::string& limit, std::int64_t use,
              const std::string& stat = "anon 1\n") {
    const std::string folder = "/sys/fs/cgroup" + path;
    root_.write(folder + "/memory.max", limit + "\n");
    root_.write(folder + "/memory.current", std::to_string(use) + "\n");
    root_.write(folder + "/memory.stat", stat);
  }
  void group1(const std::string& path, std::int64_t limit, std::int64_t use,
              const std::string& stat = "cache 1\n") {
    const std::string folder = "/sys/fs/cgroup/memory" + path;
    root_.write(folder + "/memory.limit_in_bytes", std::to_string(limit) + "\n");
    root_.write(folder + "/memory.usage_in_bytes", std::to_string(use) + "\n");
    root_.write(folder + "/memory.stat", stat);
  }
  void process_in(const std::string& lines) { root_.write("/proc/self/cgroup", lines); }
  void memlock(const std::string& soft, const std::string& capabilities) {
    root_.write("/proc/self/limits",
                "Limit                     Soft Limit           Hard Limit           Units     \n"
                "Max core file size        0                    unlimited            bytes     \n"
                "Max locked memory         " +
                    soft + "              unlimited            bytes     \n");
    root_.write("/proc/self/status", "Name:\tx\nCapPrm:\t000001ffffffffff\nCapEff:\t" +
                                         capabilities + "\nCapBnd:\t000001ffffffffff\n");
  }
  [[nodiscard]] HostLimits read() const { return read_host_limits(root_.path()); }
  void expect_left(std::int64_t left, const std::string& group) const {
    const HostLimits limits = read();
    ASSERT_TRUE(limits.group_left);
    EXPECT_EQ(*limits.group_left, left);
    EXPECT_EQ(limits.group, group);
  }
  static std::string refusal(std::size_t bytes, const HostLimits& limits) {
    try {
      check_host_memory("caller", bytes, limits);
    } catch (const HostMemoryError& error) {
      return error.what();
    }
    return "";
  }

  FakeRoot root_;
};

TEST_F(HostLimitsTest, WhatCannotBeReadIsNoLimit) {
  const HostLimits limits = read();
  EXPECT_FALSE(limits.available);
  EXPECT_FALSE(limits.group_left);
  EXPECT_FALSE(limits.memlock);
  EXPECT_EQ(refusal(std::size_t{1} << 60, limits), "");
}

TEST_F(HostLimitsTest, AvailableIsMemAvailableInBytes) {
  root_.write("/proc/meminfo", "MemTotal: 9 kB\nMemFree: 5 kB\nMemAvailable:   23213072 kB\nX: 1");
  EXPECT_EQ(read().available, 23'213'072LL * 1024);
}

TEST_F(HostLimitsTest, TheTightestAncestorOfVersion2Counts) {
  process_in("0::/a/b/c\n");
  group2("/a/b/c", "max", 400 * kMiB);
  group2("/a/b", std::to_string(1000 * kMiB), 400 * kMiB);
  group2("/a", std::to_string(2000 * kMiB), 1900 * kMiB);
  group2("/other", std::to_string(1 * kMiB), 0);
  expect_left(100 * kMiB, "/a");
  group2("/a/b", std::to_string(1000 * kMiB), 901 * kMiB);
  expect_left(99 * kMiB, "/a/b");
  group2("/a/b/c", std::to_string(400 * kMiB), 400 * kMiB);
  expect_left(0, "/a/b/c");
}

TEST_F(HostLimitsTest, MaxEverywhereIsNoLimit) {
  process_in("0::/a\n");
  group2("/a", "max", 1);
  EXPECT_FALSE(read().group_left);
}

TEST_F(HostLimitsTest, TheSoftLimitOfVersion2CountsWhereItIsTheTighter) {
  process_in("0::/a\n");
  group2("/a", std::to_string(100 * kMiB), 10 * kMiB);
  root_.write("/sys/fs/cgroup/a/memory.high", std::to_string(80 * kMiB) + "\n");
  expect_left(70 * kMiB, "/a");
  root_.write("/sys/fs/cgroup/a/memory.high", "max\n");
  expect_left(90 * kMiB, "/a");
  group2("/a", "max", 10 * kMiB);
  root_.write("/sys/fs/cgroup/a/memory.high", std::to_string(30 * kMiB) + "\n");
  expect_left(20 * kMiB, "/a");
}

TEST_F(HostLimitsTest, FileCacheCountsAsFree) {
  process_in("0::/a\n");
  group2("/a", std::to_string(100 * kMiB), 90 * kMiB,
         "anon 5\nfile 70000000\ninactive_anon 11\ninactive_file " + std::to_string(30 * kMiB) +
             "\nactive_file " + std::to_string(20 * kMiB) + "\n");
  expect_left(60 * kMiB, "/a");
}

TEST_F(HostLimitsTest, LeftIsBetweenNothingAndTheLimit) {
  process_in("0::/a\n");
  group2("/a", "100", 250);
  expect_left(0, "/a");
  group2("/a", "100", 50, "inactive_file 70\n");
  expect_left(100, "/a");
}

TEST_F(HostLimitsTest, TheTightestAncestorOfVersion1Counts) {
  process_in(
      "6:name=memoryless:/x\n5:cpuset:/x\n4:hugetlb,memory:/a/b\n1:name=systemd:/a\n0::/c\n");
  group1("/a/b", 500 * kMiB, 100 * kMiB);
  group1("/a", 700 * kMiB, 650 * kMiB,
         "inactive_file 77\ntotal_inactive_file " + std::to_string(40 * kMiB) +
             "\ntotal_active_file " + std::to_string(10 * kMiB) + "\n");
  group1("/x", 1, 1);
  expect_left(100 * kMiB, "/a");
}

TEST_F(HostLimitsTest, WhatVersion1CallsUnlimitedIsNoLimit) {
  process_in("4:memory:/a\n");
  group1("/a", 0x7FFFFFFFFFFFF000, 3);
  EXPECT_FALSE(read().group_left);
}

TEST_F(HostLimitsTest, AGroupWhosePathIsNotMountedIsTheRootOfTheMount) {
  process_in("4:memory:/docker/1234\n");
  group1("", 64 * kMiB, 4 * kMiB);
  expect_left(60 * kMiB, "/");
  process_in("0::/docker/1234\n");
  group2("", std::to_string(32 * kMiB), 1 * kMiB);
  expect_left(31 * kMiB, "/");
}

TEST_F(HostLimitsTest, ABadTableOfGroupsIsNoLimit) {
  group2("", "5", 0);
  for (const char* text : {"", "\n", "0", "0:", "0:memory", "::"}) {
    process_in(text);
    EXPECT_EQ(read().group_left.has_value(), std::string(text) == "::") << text;
  }
  process_in("0::relative");  // ends at the root as well
  expect_left(5, "/");
}

TEST_F(HostLimitsTest, MemlockIsTheSoftLimitUnlessTheProcessMayLockAll) {
  memlock("8388608", "0000000000000000");
  EXPECT_EQ(read().memlock, 8'388'608);
  memlock("8388608", "000001ffffffbfff");  // all but CAP_IPC_LOCK
  EXPECT_EQ(read().memlock, 8'388'608);
  memlock("8388608", "0000000000004000");
  EXPECT_FALSE(read().memlock);
  memlock("unlimited", "0000000000000000");
  EXPECT_FALSE(read().memlock);
}

TEST_F(HostLimitsTest, ARefusalNamesItsLimitItsValueAndTheSize) {
  HostLimits limits{.available = 5000, .group_left = 3000, .group = "/pod", .memlock = 10};
  EXPECT_EQ(refusal(3000, limits), "");
  EXPECT_EQ(refusal(3001, limits),
            "[caller] the memory limit of the control group /pod leaves 3000 B, 3001 B are wanted; "
            "raise the limit or ask for less");
  limits.group_left.reset();
  EXPECT_EQ(refusal(5000, limits), "");
  EXPECT_EQ(
      refusal(5001, limits),
      "[caller] the machine has 5000 B of memory available (MemAvailable), 5001 B are wanted; "
      "free some or ask for less");
}

TEST_F(HostLimitsTest, AFailedPinNamesMemlockWhereItIsTheLimit) {
  HostLimits limits;
  limits.memlock = 65'536;
  EXPECT_EQ(pin_failure("caller", 65'537, "cudaErrorX", limits),
            "[caller] 65537 B of host memory could not be pinned (cudaErrorX): RLIMIT_MEMLOCK is "
            "65536 B; raise it (ulimit -l, or memlock of the container) or ask for less");
  for (const std::size_t bytes : {65'536, 1}) {
    EXPECT_EQ(pin_failure("caller", bytes, "cudaErrorX", limits).find("MEMLOCK"),
              std::string::npos);
  }
  limits.memlock.reset();
  EXPECT_EQ(pin_failure("caller", 65'537, "cudaErrorX", limits),
            "[caller] 65537 B of host memory could not be pinned (cudaErrorX): the driver lacks "
            "memory, MemAvailable is not known; free some or ask for less");
  limits.available = 1234;
  EXPECT_NE(pin_failure("caller", 65'537, "cudaErrorX", limits).find("MemAvailable is 1234 B; "),
            std::string::npos);
}

TEST_F(HostLimitsTest, TheLimitsOfThisMachineAllowAByteAndNotAnExbibyte) {
  EXPECT_EQ(refusal(1, read_host_limits()), "");
  EXPECT_NE(refusal(std::size_t{1} << 60, read_host_limits()), "");
}

// --- the NUMA node of a GPU ---

class NumaNodeTest : public ::testing::Test {
 protected:
  int node(const std::string& nodes, const std::string& of_device) {
    root_.write("/sys/devices/system/node/has_memory", nodes);
    root_.write("/sys/bus/pci/devices/0000:3b:00.0/numa_node", of_device);
    return numa_node_of("0000:3B:00.0", root_.path());
  }
  FakeRoot root_;
};

TEST_F(NumaNodeTest, IsThatOfThePciDevice) {
  EXPECT_EQ(node("0-1\n", "1\n"), 1);
  EXPECT_EQ(node("0,2\n", "0\n"), 0);
}

TEST_F(NumaNodeTest, IsAnyWithOneNodeOnly) { EXPECT_EQ(node("0\n", "0\n"), kAnyNode); }

TEST_F(NumaNodeTest, IsAnyWhereItIsNotKnown) {
  EXPECT_EQ(node("0-1\n", "-1\n"), kAnyNode);
  EXPECT_EQ(node("0-1\n", "x\n"), kAnyNode);
  EXPECT_EQ(node("0-1\n", "1024\n"), kAnyNode);
  EXPECT_EQ(numa_node_of("0000:44:00.0", root_.path()), kAnyNode);
  EXPECT_EQ(numa_node_of("0000:3B:00.0", root_.path() + "/nothing"), kAnyNode);
}

}  // namespace
}  // namespace sparse_kvcm::testing
