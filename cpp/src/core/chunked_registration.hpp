// Registers a range of memory with a driver in chunks. One registration of hundreds of GiB would
// hold the driver's locks for minutes, and some kernels limit its size.
#pragma once

#include <cstddef>
#include <functional>
#include <string_view>

namespace sparse_kvcm {

// The calls to the driver. A chunk whose `add` throws is not registered; `remove` reports nothing.
struct Registrar {
  std::function<void(std::byte* data, std::size_t bytes)> add;
  std::function<void(std::byte* data)> remove;
};

// Owns registrations, and removes them in reverse order, whatever became of the others.
// Thread-compatible.
class ChunkedRegistration {
 public:
  // All chunks have `chunk_bytes`, >= 1, but for the last.
  ChunkedRegistration(std::byte* data, std::size_t bytes, std::size_t chunk_bytes,
                      Registrar registrar);
  ~ChunkedRegistration();
  ChunkedRegistration(const ChunkedRegistration&) = delete;
  ChunkedRegistration& operator=(const ChunkedRegistration&) = delete;

  // Registers the range, once, and calls registered(bytes from the start) after each chunk. Throws
  // what `add` and `registered` throw; chunks before that stay registered until this goes.
  void add_all(const std::function<void(std::size_t)>& registered = {});

 private:
  std::byte* data_;
  std::size_t bytes_;
  std::size_t chunk_bytes_;
  Registrar registrar_;
  std::size_t registered_ = 0;  // bytes
};

// Most bytes that one registration should have on a kernel of this release, as of uname: 4 GiB, but
// 2 GiB on Linux 6.11 to 6.13, which can pin no more at once, and where the release is unreadable.
[[nodiscard]] std::size_t registration_limit(std::string_view release);

// The size of chunks, of at most `limit` bytes, whose borders fall between huge pages, and between
// pages of `page_bytes` too. Where no such size is within the limit, system pages take the place of
// huge ones, and then borders may lie anywhere on a huge page. REQUIRES: page_bytes >= 1, limit a
// multiple of a huge page, system_page what this machine's pages have.
[[nodiscard]] std::size_t chunk_size(std::size_t limit, std::size_t page_bytes,
                                     std::size_t system_page);

}  // namespace sparse_kvcm
