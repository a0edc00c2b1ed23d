// Registering host memory with the driver, so that every GPU can read and write it.
#pragma once

#include <cstddef>

namespace sparse_kvcm {

// The most bytes that one registration should have on this kernel.
[[nodiscard]] std::size_t most_registered();

// Registers touched memory and returns its address on the current device. Throws HostMemoryError in
// the name of `function`, if the driver or memlock does not let it be pinned: it names
// `total_bytes` as the size that was wanted. std::runtime_error for other faults.
[[nodiscard]] std::byte* register_host_memory(const char* function, std::byte* data,
                                              std::size_t bytes, std::size_t total_bytes);

// At the end of a process the driver may be gone, and its registrations with it: no failure counts.
void unregister_host_memory(int device, std::byte* data) noexcept;
// Waits for the device in the same way.
void await_device(int device) noexcept;

}  // namespace sparse_kvcm
