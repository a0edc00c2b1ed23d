// Pinned host memory that every GPU can read and write: a HostMapping, registered with the driver
// in chunks once it has been touched.
#pragma once

#include <cstdint>
#include <string>

#include "backend/backend.hpp"
#include "core/chunked_registration.hpp"
#include "core/host_mapping.hpp"

namespace sparse_kvcm {

class PinnedBuffer final : public Buffer {
 public:
  // On the current device. `numa_node` is preferred. Throws as Backend::allocate_pinned says.
  explicit PinnedBuffer(std::size_t bytes, const PinnedOptions& options = {},
                        int numa_node = kAnyNode);
  ~PinnedBuffer() override;  // when the device's work, which may use the memory, is done
  PinnedBuffer(const PinnedBuffer&) = delete;
  PinnedBuffer& operator=(const PinnedBuffer&) = delete;

  // Nothing uses it any more, so that it goes without waiting for the device.
  void set_unused() { waits_ = false; }

  [[nodiscard]] std::byte* data() const override { return mapping_.data(); }
  [[nodiscard]] std::byte* device_data() const override { return device_data_; }
  [[nodiscard]] std::size_t bytes() const override { return mapping_.bytes(); }

 private:
  void add(std::byte* data, std::size_t bytes);

  int device_ = 0;
  bool waits_ = true;
  HostMapping mapping_;
  std::byte* device_data_ = nullptr;
  ChunkedRegistration registration_;  // goes before the mapping does
};

// The NUMA node that a GPU is attached to; kAnyNode if there is one only, or it is not known.
[[nodiscard]] int gpu_numa_node(std::int32_t index);

}  // namespace sparse_kvcm
