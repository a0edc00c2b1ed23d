// Fills ranges: touches them by all threads of the machine, then opens them to the device, never
// both at once (memory_driver.hpp says why).
#pragma once

#include <condition_variable>
#include <cstddef>
#include <functional>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "core/of_this_process.hpp"

namespace sparse_kvcm {

class MappedRange;

// Fills the ranges on this thread and others, all of them touched before the first is opened.
// `progress` hears, on this thread, of the bytes done: touched ones, and where opening is work, the
// mean of touched and opened ones. Throws what goes wrong, and what `progress` throws; what was
// opened until then stays usable.
void fill_ranges(std::span<MappedRange* const> ranges,
                 const std::function<void(std::size_t done, std::size_t total)>& progress);

// Fills ranges behind the caller's back, round by round: in each, every range gets its share of
// round_bytes, a chunk at least, so that pools of one pool group come into use together.
// Thread-safe. The thread starts with the first range. A child of a fork does not have it: there
// ranges only go.
class Filler {
 public:
  static constexpr std::size_t kRoundBytes = std::size_t{1} << 30;  // some 100 ms
  explicit Filler(std::size_t round_bytes = kRoundBytes);
  ~Filler();  // REQUIRES: no range is left, but in a child
  Filler(const Filler&) = delete;
  Filler& operator=(const Filler&) = delete;

  // Throws std::system_error if there is no thread to be had, InvalidState in a child. REQUIRES:
  // the range is not in yet, and is removed before it goes.
  void add(MappedRange& range);
  // Returns when the range is not being filled any more.
  void remove(MappedRange& range) noexcept;
  // No round begins until the next add(): for who is about to remove several.
  void pause() noexcept;

 private:
  void run();

  struct Shared {
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<MappedRange*> ranges;
    bool busy = false;  // a round runs
    bool paused = false;
    bool stop = false;
    std::thread thread;
  };

  std::size_t round_bytes_;
  OfThisProcess<Shared> shared_;
};

}  // namespace sparse_kvcm
