#include "shared_memory.hpp"

#include <cstring>
#include <map>
#include <new>

namespace sparse_kvcm::testing {
namespace {

constexpr std::size_t kAlignment = 256;  // of cudaMalloc; a pool keeps it for multiples of it
constexpr std::size_t kLargestPooled = std::size_t{256} << 10;

class PinnedResource final : public std::pmr::memory_resource {
 public:
  explicit PinnedResource(Device device) : backend_(backend_for(device)) {}

 private:
  void* do_allocate(std::size_t bytes, std::size_t) override {
    BufferPtr buffer = backend_->allocate_pinned(bytes);
    std::byte* const data = buffer->data();
    buffers_[data] = std::move(buffer);
    return data;
  }
  void do_deallocate(void* data, std::size_t, std::size_t) override { buffers_.erase(data); }
  [[nodiscard]] bool do_is_equal(const memory_resource& other) const noexcept override {
    return this == &other;
  }

  std::shared_ptr<Backend> backend_;
  std::map<void*, BufferPtr> buffers_;
};

struct Pool {
  explicit Pool(Device device)
      : pinned(device), pool({.largest_required_pool_block = kLargestPooled}, &pinned) {}
  PinnedResource pinned;
  std::pmr::unsynchronized_pool_resource pool;
};

class SharedBuffer final : public Buffer {
 public:
  SharedBuffer(Device device, std::size_t bytes)
      : memory_(shared_memory(device)),
        bytes_(bytes),
        space_((bytes + kAlignment - 1) / kAlignment * kAlignment) {
    if (bytes == 0) return;
    if (space_ < bytes) throw std::bad_alloc();
    data_ = static_cast<std::byte*>(memory_->allocate(space_, kAlignment));
    std::memset(data_, 0, bytes);
  }
  ~SharedBuffer() override {
    if (data_ != nullptr) memory_->deallocate(data_, space_, kAlignment);
  }
  SharedBuffer(const SharedBuffer&) = delete;
  SharedBuffer& operator=(const SharedBuffer&) = delete;

  [[nodiscard]] std::byte* data() const override { return data_; }
  [[nodiscard]] std::byte* device_data() const override { return data_; }
  [[nodiscard]] std::size_t bytes() const override { return bytes_; }

 private:
  std::pmr::memory_resource* memory_;
  std::size_t bytes_;
  std::size_t space_;
  std::byte* data_ = nullptr;
};

}  // namespace

std::pmr::memory_resource* shared_memory(Device device) {
  if (device.kind == DeviceKind::kCpu) return std::pmr::new_delete_resource();
  static std::map<std::int32_t, Pool> pools;
  return &pools.try_emplace(device.index, device).first->second.pool;
}

BufferPtr make_shared_buffer(Device device, std::size_t bytes) {
  return std::make_shared<SharedBuffer>(device, bytes);
}

}  // namespace sparse_kvcm::testing
