// Device memory from a driver that a test stands in for. Needs no GPU.
//
// With one, mapped_range_test, storage_test, storage_storm_test, pinned_test and manager_test run the
// same code on the real driver; scripts/gpu_check runs them all. What only a GPU can show there:
// pools of a manager are registered in chunks that end between pages (a cudaMemcpy of any one page
// of host history works), storages that grow register each filled granule once, and memlock or the
// driver's refusal comes out as HostMemoryError.
#include <gtest/gtest.h>

#include <cstddef>
#include <new>
#include <stdexcept>
#include <vector>

#include "cuda/virtual_memory.hpp"

namespace sparse_kvcm::testing {
namespace {

// What cuMemCreate answers, call by call, and what it was asked. A plain function has no state of
// its own.
struct Driver {
  std::vector<CUresult> answers;
  std::vector<CUmemAllocationProp> asked;
  std::vector<std::size_t> sizes;
};
Driver* driver = nullptr;

CUresult CUDAAPI create(CUmemGenericAllocationHandle* handle, std::size_t bytes,
                        const CUmemAllocationProp* properties, unsigned long long flags) {
  EXPECT_EQ(flags, 0U);
  const CUresult answer = driver->answers.at(driver->asked.size());
  driver->asked.push_back(*properties);
  driver->sizes.push_back(bytes);
  *handle = 100 + driver->asked.size();
  return answer;
}

class DeviceMemoryTest : public ::testing::Test {
 protected:
  DeviceMemoryTest() { driver = &driver_; }
  ~DeviceMemoryTest() override { driver = nullptr; }

  // Whether each call asked for memory that network cards reach.
  [[nodiscard]] std::vector<int> reachable() const {
    std::vector<int> wanted;
    for (const CUmemAllocationProp& asked : driver_.asked) {
      wanted.push_back(asked.allocFlags.gpuDirectRDMACapable);
    }
    return wanted;
  }

  Driver driver_;
  DeviceMemoryMaker maker_{&create, 3};
};

TEST_F(DeviceMemoryTest, IsPinnedMemoryOfTheDeviceThatNetworkCardsReach) {
  driver_.answers = {CUDA_SUCCESS};
  EXPECT_EQ(maker_.make(4096), 101U);
  EXPECT_EQ(reachable(), std::vector<int>{1});
  EXPECT_EQ(driver_.sizes, std::vector<std::size_t>{4096});
  EXPECT_EQ(driver_.asked[0].type, CU_MEM_ALLOCATION_TYPE_PINNED);
  EXPECT_EQ(driver_.asked[0].location.type, CU_MEM_LOCATION_TYPE_DEVICE);
  EXPECT_EQ(driver_.asked[0].location.id, 3);
}

TEST_F(DeviceMemoryTest, ADriverThatRefusesThePropertyGivesOrdinaryMemoryAndIsNotAskedAgain) {
  for (const CUresult refusal : {CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED}) {
    driver_ = {{refusal, CUDA_SUCCESS, CUDA_SUCCESS}, {}, {}};
    DeviceMemoryMaker maker(&create, 0);
    EXPECT_EQ(maker.make(1), 102U);
    EXPECT_EQ(maker.make(2), 103U);
    EXPECT_EQ(reachable(), (std::vector<int>{1, 0, 0}));
    EXPECT_EQ(driver_.sizes, (std::vector<std::size_t>{1, 1, 2}));
  }
}

TEST_F(DeviceMemoryTest, ARefusalWithoutThePropertyIsAFault) {
  driver_.answers = {CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_INVALID_VALUE};
  EXPECT_THROW(static_cast<void>(maker_.make(1)), std::runtime_error);
  EXPECT_THROW(static_cast<void>(maker_.make(1)), std::runtime_error);
  EXPECT_EQ(reachable(), (std::vector<int>{1, 0, 0}));
}

TEST_F(DeviceMemoryTest, LackOfMemoryIsABadAllocAndNoReasonToAskForLess) {
  driver_.answers = {CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS};
  EXPECT_THROW(static_cast<void>(maker_.make(1)), std::bad_alloc);
  EXPECT_EQ(maker_.make(1), 102U);
  EXPECT_EQ(reachable(), (std::vector<int>{1, 1}));
}

TEST_F(DeviceMemoryTest, OtherFaultsAreRuntimeErrorsThatNameTheCall) {
  driver_.answers = {CUDA_ERROR_INVALID_DEVICE};
  try {
    static_cast<void>(maker_.make(1));
    FAIL() << "was given";
  } catch (const std::runtime_error& error) {
    EXPECT_NE(std::string(error.what()).find("cuMemCreate failed: CUresult 101"), std::string::npos)
        << error.what();
  }
  EXPECT_EQ(reachable(), std::vector<int>{1});
}

}  // namespace
}  // namespace sparse_kvcm::testing
