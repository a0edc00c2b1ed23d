// Fills memory behind the caller's back: one thread for any number of ranges, a granule of each in
// turn, so that pools of one pool group come into use together.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

namespace sparse_kvcm {

class MappedRange;

// Thread-safe. The thread starts with the first range.
class Filler {
 public:
  Filler() = default;
  ~Filler();  // REQUIRES: no range is left
  Filler(const Filler&) = delete;
  Filler& operator=(const Filler&) = delete;

  // Calls range.fill_granule() until it returns false. Throws std::system_error if there is no
  // thread to be had. REQUIRES: the range is not in yet, and is removed before it goes.
  void add(MappedRange& range);
  // Returns when the range is not being filled any more.
  void remove(MappedRange& range) noexcept;

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<MappedRange*> ranges_;
  MappedRange* current_ = nullptr;  // not in ranges_
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace sparse_kvcm
