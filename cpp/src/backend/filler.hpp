// Fills memory behind the caller's back: a few threads for any number of ranges, a granule of each
// in turn, so that pools of one pool group come into use together.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

namespace sparse_kvcm {

class MappedRange;

// Thread-safe. Threads start with the first range.
class Filler {
 public:
  // REQUIRES: num_threads >= 1.
  explicit Filler(std::size_t num_threads) : num_threads_(num_threads) {}
  ~Filler();  // REQUIRES: no range is left
  Filler(const Filler&) = delete;
  Filler& operator=(const Filler&) = delete;

  // Calls range.fill_granule() until it returns false, on one thread at a time. Throws std::system_error if there is no
  // thread to be had. REQUIRES: the range is not in yet, and is removed before it goes.
  void add(MappedRange& range);
  // Returns when the range is not being filled any more.
  void remove(MappedRange& range) noexcept;

 private:
  void add_thread();
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<MappedRange*> ranges_;
  std::vector<MappedRange*> current_;  // being filled, so not in ranges_
  bool stop_ = false;
  std::size_t num_threads_;
  std::vector<std::thread> threads_;
};

}  // namespace sparse_kvcm
