// The device work of one call, as a piece of the manager's order. If the call fails on the way,
// what it had begun is fenced all the same, so that nobody takes pages or leases that it may still
// touch.
// Where even that fails, nothing that follows can be trusted, and the manager is poisoned.
#pragma once

#include "manager/manager_state.hpp"

namespace sparse_kvcm {

class DeviceWork {
 public:
  DeviceWork(ManagerState& manager, const char* function, Stream stream)
      : manager_(manager), function_(function), stream_(stream) {
    manager.timeline.enter(stream);
  }
  ~DeviceWork() {
    if (!left_) manager_.fence_failure(function_, stream_);
  }
  DeviceWork(const DeviceWork&) = delete;
  DeviceWork& operator=(const DeviceWork&) = delete;

  // The work is complete: it becomes a part of the order.
  void leave() {
    manager_.timeline.leave(stream_);
    left_ = true;
  }

 private:
  ManagerState& manager_;
  const char* function_;
  Stream stream_;
  bool left_ = false;
};

}  // namespace sparse_kvcm
