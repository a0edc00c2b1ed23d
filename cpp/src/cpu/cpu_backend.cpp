#include "cpu/cpu_backend.hpp"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <string>

#include "backend/host_memory.hpp"
#include "core/check.hpp"
#include "core/device_memory.hpp"
#include "core/host_limits.hpp"
#include "core/host_mapping.hpp"

namespace sparse_kvcm {
namespace {

constexpr std::size_t kBufferAlignment = 64;
constexpr std::size_t kLeastMapping = 4096;  // a mapping cannot be smaller, and takes 7 us

// calloc, so that the zeroes of a large pool cost nothing until they are touched.
class HostBuffer final : public Buffer {
 public:
  explicit HostBuffer(std::size_t bytes) : bytes_(bytes) {
    const bool countable = bytes <= std::numeric_limits<std::ptrdiff_t>::max() - kBufferAlignment;
    std::size_t space = bytes + kBufferAlignment;
    if (countable) memory_.reset(std::calloc(space, 1));
    if (!memory_) {
      const std::int64_t available = read_host_limits().available.value_or(0);
      fail_device_memory("Backend.allocate_device", "a buffer",
                         {bytes, static_cast<std::uint64_t>(available), 0});
    }
    void* aligned = memory_.get();
    data_ = static_cast<std::byte*>(std::align(kBufferAlignment, bytes, aligned, space));
  }

  [[nodiscard]] std::byte* data() const override { return data_; }
  [[nodiscard]] std::byte* device_data() const override { return data_; }
  [[nodiscard]] std::size_t bytes() const override { return bytes_; }

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };

  std::size_t bytes_;
  std::unique_ptr<void, Free> memory_;
  std::byte* data_ = nullptr;
};

// What a GPU would have pinned, and made in the same way.
class MappedBuffer final : public Buffer {
 public:
  MappedBuffer(std::size_t bytes, const PinnedOptions& options) : mapping_(bytes) {
    mapping_.fill(options.progress);
    if (!options.warn) return;
    for (const std::string& warning : mapping_.warnings()) options.warn(warning);
  }

  [[nodiscard]] std::byte* data() const override { return mapping_.data(); }
  [[nodiscard]] std::byte* device_data() const override { return mapping_.data(); }
  [[nodiscard]] std::size_t bytes() const override { return mapping_.bytes(); }

 private:
  HostMapping mapping_;
};

}  // namespace

BufferPtr CpuBackend::allocate_device(std::size_t bytes) {
  return std::make_shared<HostBuffer>(bytes);
}

BufferPtr CpuBackend::allocate_pinned(std::size_t bytes, const PinnedOptions& options) {
  if (bytes >= kLeastMapping) return std::make_shared<MappedBuffer>(bytes, options);
  const auto buffer = std::make_shared<HostBuffer>(bytes);
  const auto done = static_cast<std::int64_t>(bytes);
  if (options.progress && done > 0) options.progress(done, done);
  return buffer;
}

std::shared_ptr<MemoryDriver> CpuBackend::memory_driver(MemoryKind kind, const Warn& warn) {
  if (kind == MemoryKind::kPinned) return std::make_shared<FilledHostMemory>(warn);
  return std::make_shared<HostMemory>();
}

void CpuBackend::upload(std::span<const Upload> uploads, Stream) {
  for (const Upload& upload : uploads) {
    if (upload.bytes > 0) std::memcpy(upload.destination, upload.source, upload.bytes);
  }
}

void CpuBackend::patch(std::int32_t* destination, std::span<const PatchRun> runs,
                       std::span<const std::int32_t> words, Stream) {
  for (const PatchRun& run : runs) {
    if (run.source == PatchRun::kMinusOne) {
      std::fill_n(destination + run.offset, run.count, -1);
    } else {
      std::copy_n(words.begin() + run.source, run.count, destination + run.offset);
    }
  }
}

void CpuBackend::copy_pages(const PageCopy& copy, Stream) {
  for (const PageCopy::Page& page : copy.pages) {
    std::byte* device = copy.device + page.device_slot * copy.device_stride;
    std::byte* host = copy.host + page.host_slot * copy.host_stride;
    const bool to_host = copy.direction == PageDirection::kToHost;
    std::memcpy(to_host ? host : device, to_host ? device : host,
                static_cast<std::size_t>(copy.bytes));
  }
}

void CpuBackend::download(Buffer& destination, const std::byte* source, std::size_t bytes, Stream) {
  if (bytes > destination.bytes()) {
    fail_argument("Backend.download", "bytes must be at most the destination's ",
                  destination.bytes(), ", got ", bytes);
  }
  if (bytes > 0) std::memcpy(destination.data(), source, bytes);
}

void CpuBackend::clear(std::byte* destination, std::size_t bytes, Stream) {
  if (bytes > 0) std::memset(destination, 0, bytes);
}

EventPtr CpuBackend::record(Stream) { return std::make_shared<const Event>(); }
void CpuBackend::wait(Stream, const Event&) {}
void CpuBackend::synchronize(const Event&) {}
bool CpuBackend::is_done(const Event&) const { return true; }
bool CpuBackend::is_capturing(Stream) const { return false; }

std::shared_ptr<Backend> make_cpu_backend() { return std::make_shared<CpuBackend>(); }

}  // namespace sparse_kvcm
