// Addresses of the process, and the memory behind them, as two things: a range is reserved once
// and keeps its address while memory comes and goes. Linux; thread-safe.
#pragma once

#include <cstddef>

namespace sparse_kvcm {

// Throws HostMemoryError: mmap or mprotect of `bytes` gave errno `error`. Names the limits that the
// process has.
[[noreturn]] void fail_addresses(const char* function, std::size_t bytes, int error);

// A multiple of it begins and ends every piece of memory below.
[[nodiscard]] std::size_t system_page_bytes();

// `bytes` of addresses that nothing may touch yet, at a multiple of `alignment`, a power of two.
// Throws HostMemoryError. bytes > 0.
[[nodiscard]] std::byte* reserve_addresses(std::size_t bytes, std::size_t alignment);
void release_addresses(std::byte* address, std::size_t bytes) noexcept;

// Makes a part of a reservation readable and writable; it reads as zeroes and takes no memory until
// it is touched. Throws HostMemoryError, and then nothing has changed.
void commit_memory(std::byte* address, std::size_t bytes);
// The opposite: its memory is free, and touching it faults.
void decommit_memory(std::byte* address, std::size_t bytes) noexcept;

}  // namespace sparse_kvcm
