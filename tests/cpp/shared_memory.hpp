// Memory that the host and a device both read and write, for tests that look into arenas and tables
// while an engine works on them: plain memory on the CPU, pinned memory on a GPU. From one pool per
// device, since pinning takes longer than a test's step.
//
// Whoever reads or writes it waits for the device first.
#pragma once

#include <memory_resource>

#include "backend/backend.hpp"

namespace sparse_kvcm::testing {

// Not thread-safe.
[[nodiscard]] std::pmr::memory_resource* shared_memory(Device device);

// Zeroed. Both addresses are the same.
[[nodiscard]] BufferPtr make_shared_buffer(Device device, std::size_t bytes);

}  // namespace sparse_kvcm::testing
