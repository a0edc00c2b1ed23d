// What the engine asks of every backend, apart from the operations; and how a device is named.
#include "backend/backend.hpp"

#include <algorithm>
#include <array>
#include <memory>
#include <new>
#include <vector>

#include "sparse_kvcm/error.hpp"
#include "test_device.hpp"

namespace sparse_kvcm::testing {
namespace {

constexpr Stream kStream = 0;
constexpr std::byte kPoison{0xA5};

class BackendTest : public DeviceTest {
 protected:
  // Device memory as the host sees it.
  std::vector<std::byte> read(const Buffer& buffer) {
    const BufferPtr pinned = backend().allocate_pinned(buffer.bytes());
    std::fill_n(pinned->data(), buffer.bytes(), kPoison);
    backend().download(*pinned, buffer.device_data(), buffer.bytes(), kStream);
    backend().synchronize(*backend().record(kStream));
    return {pinned->data(), pinned->data() + buffer.bytes()};
  }

  void fill(const Buffer& buffer, std::byte value) {
    const std::vector<std::byte> bytes(buffer.bytes(), value);
    const Upload upload{buffer.device_data(), bytes.data(), bytes.size()};
    backend().upload({&upload, 1}, kStream);
  }

  Backend& backend() {
    if (!backend_) backend_ = backend_for(device());
    return *backend_;
  }

 private:
  std::shared_ptr<Backend> backend_;
};
SPARSE_KVCM_ON_EVERY_DEVICE(BackendTest);

TEST_P(BackendTest, IsTheSameObjectForTheSameDevice) {
  EXPECT_EQ(backend_for(device()), backend_for(device()));
  EXPECT_EQ(backend().device(), device());
}

TEST_P(BackendTest, AllocatesZeroedMemory) {
  constexpr std::size_t kBytes = 4097;
  for (int round = 0; round < 3; ++round) {  // freed memory comes back
    const BufferPtr buffer = backend().allocate_device(kBytes);
    EXPECT_EQ(read(*buffer), std::vector<std::byte>(kBytes));
    fill(*buffer, kPoison);
    const BufferPtr pinned = backend().allocate_pinned(kBytes);
    EXPECT_EQ(std::count(pinned->data(), pinned->data() + kBytes, std::byte{0}), kBytes);
    std::fill_n(pinned->data(), kBytes, kPoison);
  }
}

TEST_P(BackendTest, AllocatesNoBytes) {
  EXPECT_EQ(backend().allocate_device(0)->bytes(), 0u);
  EXPECT_EQ(backend().allocate_pinned(0)->bytes(), 0u);
}

TEST_P(BackendTest, MemoryThatNoMachineHasIsRefusedWithWhatItWasForAndWhatThereIs) {
  for (const std::size_t bytes : {std::size_t{1} << 60, ~std::size_t{0}}) {
    EXPECT_THROW(static_cast<void>(backend().allocate_device(bytes)), DeviceMemoryError);
    try {
      static_cast<void>(allocate_part(backend(), bytes, "Engine", "the table"));
      FAIL() << "was given";
    } catch (const DeviceMemoryError& error) {
      const std::string text = error.what();
      EXPECT_TRUE(text.starts_with("[Engine] the table takes " + std::to_string(bytes) +
                                   " B of device memory, " + std::to_string(error.bytes().free) +
                                   " B are free"))
          << text;
      EXPECT_TRUE(text.ends_with("; ask for less, or let others give some back")) << text;
      EXPECT_EQ(error.bytes().wanted, bytes);
      EXPECT_GT(error.bytes().free, 0U);
      EXPECT_LT(error.bytes().free, bytes);
    }
  }
  EXPECT_EQ(read(*backend().allocate_device(16)), std::vector<std::byte>(16));
}

TEST_P(BackendTest, UploadLetsItsSourcesChangeOnReturn) {
  constexpr std::size_t kBytes = 1 << 20;
  constexpr int kRounds = 8;
  std::vector<BufferPtr> buffers;
  const BufferPtr source = backend().allocate_pinned(kBytes);
  for (int round = 0; round < kRounds; ++round) {
    buffers.push_back(backend().allocate_device(kBytes));
    std::fill_n(source->data(), kBytes, static_cast<std::byte>(round + 1));
    const std::array uploads{
        Upload{buffers.back()->device_data(), source->data(), kBytes / 2},
        Upload{nullptr, nullptr, 0},
        Upload{buffers.back()->device_data() + kBytes / 2, source->data(), kBytes / 2}};
    backend().upload(uploads, kStream);
    std::fill_n(source->data(), kBytes, kPoison);
  }
  for (int round = 0; round < kRounds; ++round) {
    const std::vector<std::byte> expected(kBytes, static_cast<std::byte>(round + 1));
    EXPECT_EQ(read(*buffers[round]), expected) << "round " << round;
  }
}

TEST_P(BackendTest, ClearSetsExactlyTheBytesThatItNames) {
  const BufferPtr buffer = backend().allocate_device(64);
  fill(*buffer, kPoison);
  backend().clear(buffer->device_data() + 16, 7, kStream);
  std::vector<std::byte> expected(64, kPoison);
  std::fill_n(expected.begin() + 16, 7, std::byte{0});
  EXPECT_EQ(read(*buffer), expected);
}

TEST_P(BackendTest, DownloadRefusesMoreThanTheDestinationHolds) {
  const BufferPtr source = backend().allocate_device(32);
  const BufferPtr destination = backend().allocate_pinned(31);
  EXPECT_THROW(backend().download(*destination, source->device_data(), 32, kStream),
               InvalidArgument);
}

TEST_P(BackendTest, AnEventIsDoneOnceItWasWaitedFor) {
  const EventPtr event = backend().record(kStream);
  backend().wait(kStream, *event);
  backend().synchronize(*event);
  EXPECT_TRUE(backend().is_done(*event));
}

TEST_P(BackendTest, NothingIsCapturingOutsideAGraph) {
  EXPECT_FALSE(backend().is_capturing(kStream));
}

TEST(BackendForTest, RefusesIndicesThatNoDeviceHas) {
  EXPECT_THROW(static_cast<void>(backend_for({DeviceKind::kCpu, 1})), InvalidArgument);
  EXPECT_THROW(static_cast<void>(backend_for({DeviceKind::kCpu, -1})), InvalidArgument);
  EXPECT_THROW(static_cast<void>(backend_for({DeviceKind::kCuda, -1})), InvalidArgument);
  EXPECT_THROW(static_cast<void>(backend_for({DeviceKind::kCuda, 1000})), NotAvailable);
}

TEST(CudaProbeTest, GivesAReasonExactlyWhenCudaIsUnavailable) {
  EXPECT_EQ(cuda_is_available(), cuda_unavailable_reason().empty());
}

TEST(DeviceNameTest, ParsesWhatToStringWrites) {
  for (const Device device :
       {Device{}, Device{DeviceKind::kCuda, 0}, Device{DeviceKind::kCuda, 7}}) {
    EXPECT_EQ(parse_device(to_string(device)), device);
  }
  EXPECT_EQ(parse_device("cuda"), (Device{DeviceKind::kCuda, 0}));
}

TEST(DeviceNameTest, RefusesOtherNames) {
  for (const char* name :
       {"", "CPU", "cpu:0", "cuda:", "cuda:-1", "cuda:1x", "cuda: 1", "cuda:99999999999", "gpu"}) {
    EXPECT_THROW(static_cast<void>(parse_device(name)), InvalidArgument) << name;
  }
}

}  // namespace
}  // namespace sparse_kvcm::testing
