// Exceptions. Each derives from the standard exception that Python bindings map to the nearest
// builtin. Messages begin with the function in brackets and name argument, limit and value:
// "[Batch.add] row must be in [0, 8), got -1".
// After any of them the object that threw is as it was before the call.
#pragma once

#include <cstdint>
#include <new>
#include <stdexcept>
#include <string>

namespace sparse_kvcm {

// An argument is outside what the function takes. Python: ValueError.
class InvalidArgument : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// The call does not fit the object's state: a closed request, an open step. Python: RuntimeError.
class InvalidState : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

// Host history or the arena has too few free pages. Free some and call again.
class OutOfPages : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Host memory that cannot be had: what() names the limit that stands in the way (memory of the
// machine, a control group, memlock, address space), its value, the size wanted and what to do.
// Python: HostMemoryError, a MemoryError.
class HostMemoryError : public std::bad_alloc {
 public:
  explicit HostMemoryError(const std::string& what) : text_(what) {}
  [[nodiscard]] const char* what() const noexcept override { return text_.what(); }

 private:
  std::runtime_error text_;  // a string whose copies do not throw
};

// Device memory that cannot be had: what() names what it was for, the size wanted, what is free,
// and what to do. Python: DeviceMemoryError, a MemoryError.
class DeviceMemoryError : public std::bad_alloc {
 public:
  struct Bytes {  // 0 = not known
    std::uint64_t wanted = 0;
    std::uint64_t free = 0;   // on the device, when it was asked
    std::uint64_t total = 0;  // that the device has
  };
  DeviceMemoryError(const std::string& what, const Bytes& bytes) : text_(what), bytes_(bytes) {}
  [[nodiscard]] const char* what() const noexcept override { return text_.what(); }
  [[nodiscard]] const Bytes& bytes() const { return bytes_; }

 private:
  std::runtime_error text_;
  Bytes bytes_;
};

// A device failed, and what was begun could not be fenced either: pages may change behind the
// manager's back, so it refuses all further work and says why. Close what there is and make a new
// one.
class CorruptedError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// This build or machine lacks what the call needs (no CUDA compiler, no driver, no GPU).
class NotAvailable : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace sparse_kvcm
