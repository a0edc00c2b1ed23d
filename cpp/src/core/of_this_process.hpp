// Owns what the threads of a process share: a lock, a condition, a thread. A child of a fork has a
// copy of it and none of those threads, so whatever they held stays held for ever. It must neither
// wait for it nor destroy it (a condition waits there for those who wait), and leaves it where it
// is.
#pragma once

#include <unistd.h>

namespace sparse_kvcm {

template <class T>
class OfThisProcess {
 public:
  OfThisProcess() : value_(new T), owner_(getpid()) {}
  ~OfThisProcess() {
    if (is_here()) delete value_;
  }
  OfThisProcess(const OfThisProcess&) = delete;
  OfThisProcess& operator=(const OfThisProcess&) = delete;

  // False in a child.
  [[nodiscard]] bool is_here() const { return owner_ == getpid(); }
  T* operator->() const { return value_; }
  T& operator*() const { return *value_; }

 private:
  T* value_;
  pid_t owner_;
};

}  // namespace sparse_kvcm
