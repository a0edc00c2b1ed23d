#include "core/host_mapping.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <limits>

#include "core/address_space.hpp"
#include "core/check.hpp"
#include "core/host_limits.hpp"
#include "core/host_touch.hpp"
#include "core/rounding.hpp"

namespace sparse_kvcm {
namespace {

constexpr const char* kFunction = "allocate_pinned";

std::byte* map(std::size_t bytes) {
  void* const mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped != MAP_FAILED) return static_cast<std::byte*>(mapped);
  fail_addresses(kFunction, bytes, errno);
}

void unmap(std::byte* data, std::size_t bytes) {
  if (bytes > 0) static_cast<void>(munmap(data, bytes));
}

// Maps `bytes`, rounded up to whole pages, at a multiple of kHugePage.
std::byte* map_aligned(std::size_t bytes) {
  const std::size_t size = round_up(bytes, system_page_bytes());
  if (size < kHugePage) return map(size);
  std::byte* const mapped = map(size + kHugePage);
  const std::size_t past = reinterpret_cast<std::uintptr_t>(mapped) % kHugePage;
  const std::size_t before = past == 0 ? 0 : kHugePage - past;
  unmap(mapped, before);
  unmap(mapped + before + size, kHugePage - before);
  return mapped + before;
}

}  // namespace

HostMapping::HostMapping(std::size_t bytes, int numa_node)
    : bytes_(bytes), advice_(kFunction, numa_node, [this](const std::string& text) {
        warnings_.push_back(text);
      }) {
  if (bytes == 0) return;
  if (bytes > std::numeric_limits<std::size_t>::max() / 2) {
    throw HostMemoryError(message(kFunction, "no machine has ", bytes, " B; ask for less"));
  }
  check_host_memory(kFunction, bytes);
  data_ = map_aligned(bytes);
  advice_.apply(data_, bytes);
}

HostMapping::~HostMapping() {
  if (owner_ == 0 || owner_ == getpid()) unmap(data_, bytes_);
}

void HostMapping::keep_from_children() {
  if (bytes_ == 0) return;
  owner_ = getpid();
  sparse_kvcm::keep_from_children(data_, bytes_);
}

void HostMapping::fill(const FillProgress& progress) {
  if (bytes_ == 0) return;
  const MemoryPart whole{data_, bytes_};
  touch_parts(
      {&whole, 1},
      [](std::byte* data, std::size_t bytes) { touch_pages_or_throw(kFunction, data, bytes); },
      [&](std::size_t done) {
        if (progress) progress(static_cast<std::int64_t>(done), static_cast<std::int64_t>(bytes_));
      });
  advice_.verify(data_, bytes_);
}

}  // namespace sparse_kvcm
