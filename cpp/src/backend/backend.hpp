// The one device interface. A Backend has few, coarse operations: the engine pays one virtual call
// per batch, not per unit. cpu/ implements it in plain loops and is the oracle; cuda/ implements it
// on an NVIDIA GPU; no_cuda/ is linked instead of cuda/ where there is no nvcc.
//
// Stateless towards the engine and thread-safe. REQUIRES, of all operations: parameters that
// ops_check.hpp accepts, and at least one row, move or lease. What a backend still reports are
// faults of the device, as std::runtime_error, and from resolve a selection that is wider than the
// shared memory of this device allows, as InvalidArgument.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "backend/memory_driver.hpp"
#include "core/host_advice.hpp"
#include "sparse_kvcm/config.hpp"
#include "sparse_kvcm/ops.hpp"
#include "sparse_kvcm/types.hpp"

namespace sparse_kvcm {

// A point in a stream's order. Empty on backends that run every call to its end.
class Event {
 public:
  virtual ~Event() = default;
};
using EventPtr = std::shared_ptr<const Event>;

// Owns memory that was zeroed. `data` is what the host dereferences
// (null for device memory of a GPU), `device_data` what kernels do.
class Buffer {
 public:
  virtual ~Buffer() = default;
  [[nodiscard]] virtual std::byte* data() const = 0;
  [[nodiscard]] virtual std::byte* device_data() const = 0;
  [[nodiscard]] virtual std::size_t bytes() const = 0;
};
using BufferPtr = std::shared_ptr<Buffer>;

// `bytes` bytes from host memory `source` to device memory `destination`.
struct Upload {
  std::byte* destination = nullptr;
  const void* source = nullptr;
  std::size_t bytes = 0;
};

// `count` words of 32 bits, from word `offset` of a buffer on: words `source`, `source` + 1, ... of
// what comes with them, or each -1.
struct PatchRun {
  static constexpr std::int32_t kMinusOne = -1;  // as `source`
  std::int64_t offset = 0;
  std::int32_t count = 0;
  std::int32_t source = kMinusOne;
};

enum class PageDirection : std::uint8_t { kToHost, kToDevice };

// Pages of one pool on the device and of one in host memory. `bytes` of each go, from the beginning
// of its slot.
struct PageCopy {
  struct Page {
    std::int32_t device_slot = 0;
    std::int32_t host_slot = 0;
  };
  std::byte* device = nullptr;  // slot 0, as `host`; an address that kernels have
  std::int64_t device_stride = 0;
  std::byte* host = nullptr;
  std::int64_t host_stride = 0;
  std::int64_t bytes = 0;
  std::span<const Page> pages;
  PageDirection direction = PageDirection::kToHost;
};

// How pinned memory is made.
struct PinnedOptions {
  FillProgress progress = nullptr;
  Warn warn = nullptr;          // told what did not go as wished
  std::size_t chunk_bytes = 0;  // most of one registration, >= 2 MiB; 0 = what suits the kernel
};

enum class MemoryKind : std::uint8_t { kDevice, kPinned };

class Backend {
 public:
  virtual ~Backend() = default;
  [[nodiscard]] virtual Device device() const = 0;

  // Throws DeviceMemoryError if there is not that much. bytes == 0 gives a buffer of 0 bytes.
  [[nodiscard]] virtual BufferPtr allocate_device(std::size_t bytes) = 0;
  // Host memory that kernels can read and write, of exactly this size. All of it is touched here.
  // Throws HostMemoryError, which names the limit, and what options.progress throws.
  [[nodiscard]] virtual BufferPtr allocate_pinned(std::size_t bytes,
                                                  const PinnedOptions& options = {}) = 0;

  // What backs ranges that grow and shrink (mapped_range.hpp). Made anew by each call. `warn`
  // hears, on any thread, what did not go as wished. Throws NotAvailable if the device has no such
  // memory.
  [[nodiscard]] virtual std::shared_ptr<MemoryDriver> memory_driver(MemoryKind kind,
                                                                    const Warn& warn = {}) = 0;

  // Copies all of `uploads` in stream order. Sources may be reused when the call returns.
  virtual void upload(std::span<const Upload> uploads, Stream stream) = 0;
  // Writes `runs` of 32-bit words into device memory, in stream order. Runs do not overlap. What
  // they are made of may be reused when the call returns.
  virtual void patch(std::int32_t* destination, std::span<const PatchRun> runs,
                     std::span<const std::int32_t> words, Stream stream) = 0;
  // Copies pages between a pool and host memory, in stream order, across borders of registrations.
  virtual void copy_pages(const PageCopy& copy, Stream stream) = 0;
  // Copies `bytes` of device memory `source` into pinned `destination`, in stream order.
  virtual void download(Buffer& destination, const std::byte* source, std::size_t bytes,
                        Stream stream) = 0;
  // Sets `bytes` of device memory to zero, in stream order.
  virtual void clear(std::byte* destination, std::size_t bytes, Stream stream) = 0;

  [[nodiscard]] virtual EventPtr record(Stream stream) = 0;
  virtual void wait(Stream stream, const Event& event) = 0;  // the stream waits
  virtual void synchronize(const Event& event) = 0;          // the host waits
  [[nodiscard]] virtual bool is_done(const Event& event) const = 0;
  [[nodiscard]] virtual bool is_capturing(Stream stream) const = 0;

  virtual void resolve(const ops::ResolveParams& params, Stream stream) = 0;
  virtual void fetch(const ops::FetchParams& params, Stream stream) = 0;
  virtual void move_units(const ops::MoveParams& params, Stream stream) = 0;
  virtual void convert(const ops::ConvertParams& params, Stream stream) = 0;
  virtual void reset_leases(const ops::ResetParams& params, Stream stream) = 0;
};

// As allocate_device, for `part` of what `function` makes: its DeviceMemoryError says so.
[[nodiscard]] BufferPtr allocate_part(Backend& backend, std::size_t bytes, const char* function,
                                      std::string_view part);

// The backend of `device`, one per device and process, made at first use. Thread-safe.
// Throws NotAvailable if this build or machine has no such device, InvalidArgument for a negative
// index or a CPU index other than 0.
[[nodiscard]] std::shared_ptr<Backend> backend_for(Device device);

// Defined in cpu/.
[[nodiscard]] std::shared_ptr<Backend> make_cpu_backend();
// Defined in cuda/ or in no_cuda/; CMake links one of them.
// Throws NotAvailable if this build or machine has no such GPU.
[[nodiscard]] std::shared_ptr<Backend> make_cuda_backend(std::int32_t index);

}  // namespace sparse_kvcm
