// One order for all device work of a manager, whatever streams it is put on: each piece of work
// enters after everything that left before it. That is what makes reuse of pages and leases safe;
// only the launches of an open step lie outside, and what they read is not reused until it ends.
#pragma once

#include "backend/backend.hpp"

namespace sparse_kvcm {

class Timeline {
 public:
  explicit Timeline(Backend& backend) : backend_(backend) {}

  // `stream` waits for all work that has left.
  void enter(Stream stream) {
    if (newest_) backend_.wait(stream, *newest_);
  }
  // What is on `stream` now is part of the order.
  void leave(Stream stream) { newest_ = backend_.record(stream); }
  // The host waits for all work that has left, before it writes memory itself.
  void join() {
    if (newest_) backend_.synchronize(*newest_);
  }
  // Behind all work that has left; null if there was none.
  [[nodiscard]] const EventPtr& newest() const { return newest_; }

 private:
  Backend& backend_;
  EventPtr newest_;
};

}  // namespace sparse_kvcm
