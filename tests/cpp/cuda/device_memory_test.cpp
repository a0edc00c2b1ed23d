// Device memory from a driver that a test stands in for. Needs no GPU.
//
// With one, mapped_range_test, storage_test, storage_storm_test, pinned_test and manager_test run
// the same code on the real driver; scripts/gpu_check runs them all. What only a GPU can show
// there:
// pools of a manager are registered in chunks that end between pages (a cudaMemcpy of any one page
// of host history works), storages that grow register each filled granule once, and memlock or the
// driver's refusal comes out as HostMemoryError.
#include <gtest/gtest.h>

#include <cstddef>
#include <deque>
#include <map>
#include <new>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/virtual_memory.hpp"
#include "sparse_kvcm/error.hpp"

namespace sparse_kvcm::testing {
namespace {

constexpr std::size_t kGranule = 4096;
constexpr CUdeviceptr kBase = 64 * kGranule;

// What the driver has, and what it was asked. A plain function has no state of its own.
struct Driver {
  std::map<std::string, std::deque<CUresult>> answers;  // to the next calls; then what is right
  std::string calls;                                    // their first letters, and R for release
  std::vector<int> reachable;                           // by network cards: as asked, by call
  std::vector<std::size_t> alignments;
  std::set<CUmemGenericAllocationHandle> handles;
  std::map<CUdeviceptr, std::size_t> mapped;  // as cuMemMap did

  CUresult answer(const std::string& call, char letter) {
    calls += letter;
    std::deque<CUresult>& next = answers[call];
    if (next.empty()) return CUDA_SUCCESS;
    const CUresult result = next.front();
    next.pop_front();
    return result;
  }
  // Pieces that begin in the range if they fill it, else 0.
  [[nodiscard]] std::size_t pieces(CUdeviceptr begin, std::size_t bytes) const {
    std::size_t count = 0;
    CUdeviceptr at = begin;
    for (auto piece = mapped.find(begin); piece != mapped.end() && piece->first == at; ++piece) {
      at += piece->second;
      ++count;
      if (at == begin + bytes) return count;
    }
    return 0;
  }
};
Driver* driver = nullptr;

CUresult CUDAAPI get_granularity(std::size_t* granularity, const CUmemAllocationProp* wanted,
                                 CUmemAllocationGranularity_flags) {
  driver->reachable.push_back(wanted->allocFlags.gpuDirectRDMACapable);
  *granularity = kGranule;
  return driver->answer("granularity", 'g');
}
CUresult CUDAAPI reserve(CUdeviceptr* address, std::size_t, std::size_t alignment, CUdeviceptr,
                         unsigned long long) {
  driver->alignments.push_back(alignment);
  *address = kBase;
  return driver->answer("reserve", 'r');
}
CUresult CUDAAPI create(CUmemGenericAllocationHandle* handle, std::size_t,
                        const CUmemAllocationProp* wanted, unsigned long long) {
  EXPECT_EQ(wanted->type, CU_MEM_ALLOCATION_TYPE_PINNED);
  EXPECT_EQ(wanted->location.type, CU_MEM_LOCATION_TYPE_DEVICE);
  EXPECT_EQ(wanted->location.id, 3);
  driver->reachable.push_back(wanted->allocFlags.gpuDirectRDMACapable);
  const CUresult result = driver->answer("create", 'c');
  *handle = driver->calls.size();
  if (result == CUDA_SUCCESS) driver->handles.insert(*handle);
  return result;
}
CUresult CUDAAPI release(CUmemGenericAllocationHandle handle) {
  EXPECT_EQ(driver->handles.erase(handle), 1U);
  return driver->answer("release", 'R');
}
CUresult CUDAAPI map(CUdeviceptr address, std::size_t bytes, std::size_t,
                     CUmemGenericAllocationHandle handle, unsigned long long) {
  EXPECT_EQ(driver->handles.count(handle), 1U);
  const CUresult result = driver->answer("map", 'm');
  if (result != CUDA_SUCCESS) return result;
  EXPECT_TRUE(driver->mapped.emplace(address, bytes).second);
  return result;
}
CUresult CUDAAPI unmap(CUdeviceptr address, std::size_t bytes) {
  EXPECT_EQ(driver->pieces(address, bytes), 1U);
  driver->calls += 'u';
  return driver->mapped.erase(address) == 1 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult CUDAAPI set_access(CUdeviceptr address, std::size_t bytes, const CUmemAccessDesc* access,
                            std::size_t count) {
  EXPECT_GT(driver->pieces(address, bytes), 0U);
  EXPECT_EQ(count, 1U);
  EXPECT_EQ(access->location.id, 3);
  EXPECT_EQ(access->flags, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
  return driver->answer("access", 'a');
}

constexpr VirtualMemoryApi kApi{&reserve, nullptr, &create,     &release,
                                &map,     &unmap,  &set_access, &get_granularity};

class DeviceMemoryTest : public ::testing::Test {
 protected:
  DeviceMemoryTest() { driver = &driver_; }
  ~DeviceMemoryTest() override {
    EXPECT_TRUE(driver_.handles.empty());
    driver = nullptr;
  }
  static std::byte* at(std::size_t granule) {
    return reinterpret_cast<std::byte*>(kBase + granule * kGranule);
  }
  static constexpr CUresult kRefusals[] = {CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED};

  Driver driver_;
};

TEST_F(DeviceMemoryTest, EveryGranuleIsMemoryOfItsOwnAndAllAreOpenedAtOnce) {
  VirtualMemory memory(kApi, 3);
  EXPECT_EQ(memory.granularity(), kGranule);
  memory.map(at(0), 3 * kGranule, kGranule);
  EXPECT_EQ(driver_.calls, "gcmRcmRcmRa");
  EXPECT_EQ(driver_.reachable, std::vector<int>(4, 1));
  EXPECT_EQ(driver_.mapped.size(), 3U);
  memory.unmap(at(2), kGranule, kGranule);
  memory.unmap(at(0), 2 * kGranule, kGranule);
  EXPECT_EQ(driver_.calls, "gcmRcmRcmRauuu");
  EXPECT_TRUE(driver_.mapped.empty());
}

TEST_F(DeviceMemoryTest, ADriverThatRefusesThePropertyGivesOrdinaryMemoryAndIsNotAskedAgain) {
  for (const CUresult refusal : kRefusals) {
    driver_ = {};
    driver_.answers["create"] = {CUDA_SUCCESS, refusal};
    std::vector<std::string> warnings;
    VirtualMemory memory(kApi, 3, [&](const std::string& text) { warnings.push_back(text); });
    memory.map(at(0), 3 * kGranule, kGranule);
    memory.map(at(3), kGranule, kGranule);
    ASSERT_EQ(warnings.size(), 1U);
    EXPECT_NE(warnings[0].find("cuda:3 that network cards reach"), std::string::npos);
    EXPECT_EQ(driver_.reachable, (std::vector<int>{1, 1, 1, 0, 0, 0}));
    EXPECT_EQ(driver_.mapped.size(), 4U);
  }
}

TEST_F(DeviceMemoryTest, AGranularityThatIsRefusedWithThePropertyIsThatOfOrdinaryMemory) {
  for (const CUresult refusal : kRefusals) {
    driver_ = {};
    driver_.answers["granularity"] = {refusal};
    VirtualMemory memory(kApi, 3);
    EXPECT_EQ(memory.granularity(), kGranule);
    memory.map(at(0), kGranule, kGranule);
    EXPECT_EQ(driver_.reachable, (std::vector<int>{1, 0, 0}));
  }
}

TEST_F(DeviceMemoryTest, AnAlignmentThatIsRefusedIsLeftToTheDriver) {
  VirtualMemory memory(kApi, 3);
  for (const CUresult refusal : kRefusals) {
    driver_.answers["reserve"] = {refusal};
    EXPECT_EQ(memory.reserve(8 * kGranule, 8 * kGranule), at(0));
  }
  EXPECT_EQ(driver_.alignments, (std::vector<std::size_t>{8 * kGranule, 0, 8 * kGranule, 0}));
}

TEST_F(DeviceMemoryTest, WhateverFailsOnTheWayNothingStaysMapped) {
  const std::vector<CUresult> at_third{CUDA_SUCCESS, CUDA_SUCCESS, CUDA_ERROR_OUT_OF_MEMORY};
  const std::map<std::string, std::vector<CUresult>> faults{
      {"create", at_third}, {"map", at_third}, {"access", {CUDA_ERROR_OUT_OF_MEMORY}}};
  for (const auto& [call, answers] : faults) {
    driver_ = {};
    VirtualMemory memory(kApi, 3);
    driver_.answers[call] = {answers.begin(), answers.end()};
    EXPECT_THROW(memory.map(at(0), 4 * kGranule, kGranule), DeviceMemoryError) << call;
    EXPECT_TRUE(driver_.mapped.empty()) << call;
    EXPECT_EQ(driver_.reachable.back(), 1) << "a lack of memory is no reason to ask for less";
    memory.map(at(0), 4 * kGranule, kGranule);
    EXPECT_EQ(driver_.mapped.size(), 4U) << call;
  }
}

TEST_F(DeviceMemoryTest, ARefusalWithoutThePropertyIsAFault) {
  VirtualMemory memory(kApi, 3);
  driver_.answers["create"] = std::deque<CUresult>(4, CUDA_ERROR_INVALID_VALUE);
  EXPECT_THROW(memory.map(at(0), kGranule, kGranule), std::runtime_error);
  EXPECT_THROW(memory.map(at(0), kGranule, kGranule), std::runtime_error);
  EXPECT_EQ(driver_.reachable, (std::vector<int>{1, 1, 0, 1, 0})) << "it was not the property";
  driver_.answers["reserve"] = {CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_INVALID_VALUE};
  EXPECT_THROW(static_cast<void>(memory.reserve(kGranule, kGranule)), std::runtime_error);
  driver_.answers["granularity"] = {CUDA_ERROR_NOT_SUPPORTED, CUDA_ERROR_NOT_SUPPORTED};
  EXPECT_THROW(VirtualMemory(kApi, 3), std::runtime_error);
}

TEST_F(DeviceMemoryTest, OtherFaultsAreRuntimeErrorsThatNameTheCall) {
  VirtualMemory memory(kApi, 3);
  driver_.answers["create"] = {CUDA_ERROR_INVALID_DEVICE};
  try {
    memory.map(at(0), kGranule, kGranule);
    FAIL() << "was given";
  } catch (const std::runtime_error& error) {
    EXPECT_NE(std::string(error.what()).find("cuMemCreate failed: CUresult 101"), std::string::npos)
        << error.what();
  }
  EXPECT_EQ(driver_.reachable, (std::vector<int>{1, 1}));
}

}  // namespace
}  // namespace sparse_kvcm::testing
