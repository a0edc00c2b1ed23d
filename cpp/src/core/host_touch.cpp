#include "core/host_touch.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "core/check.hpp"

namespace sparse_kvcm {
namespace {

constexpr std::size_t kPiece = std::size_t{64} << 20;  // touched at a time by one thread
constexpr std::size_t kMaxThreads = 32;

using Touch = std::function<void(std::byte* data, std::size_t bytes)>;

std::vector<MemoryPart> cut(std::span<const MemoryPart> parts) {
  std::vector<MemoryPart> pieces;
  for (const MemoryPart& part : parts) {
    for (std::size_t begin = 0; begin < part.bytes; begin += kPiece) {
      pieces.push_back({part.data + begin, std::min(kPiece, part.bytes - begin)});
    }
  }
  return pieces;
}

// Hands pieces to threads, in order, and knows how many from the first on have been touched.
class Work {
 public:
  Work(const std::vector<MemoryPart>& pieces, const Touch& touch)
      : pieces_(pieces), touch_(touch), touched_(pieces.size()) {}

  // Touches pieces until none is left.
  void run() {
    std::unique_lock lock(mutex_);
    while (!fault_ && next_ < pieces_.size()) {
      const std::size_t piece = next_++;
      lock.unlock();
      std::exception_ptr fault;
      try {
        touch_(pieces_[piece].data, pieces_[piece].bytes);
      } catch (...) {
        fault = std::current_exception();
      }
      lock.lock();
      if (fault) fault_ = fault;
      touched_[piece] = true;
      changed_.notify_one();
    }
  }

  // Waits until a piece, and with it all before it, has been touched. REQUIRES: called in order.
  void wait(std::size_t piece) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return fault_ || touched_[piece]; });
    if (fault_) std::rethrow_exception(fault_);
  }

  // Threads end after the piece that they are at.
  void stop() {
    const std::lock_guard lock(mutex_);
    next_ = pieces_.size();
  }

 private:
  const std::vector<MemoryPart>& pieces_;
  const Touch& touch_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<bool> touched_;  // by piece
  std::size_t next_ = 0;
  std::exception_ptr fault_;
};

// Threads that run a Work, until there is nothing to do or this goes.
class Workers {
 public:
  Workers(Work& work, std::size_t wanted) : work_(work) {
    bool started = true;
    while (started && threads_.size() < wanted) started = start_one();
    if (threads_.empty()) work.run();
  }
  ~Workers() { work_.stop(); }
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

 private:
  // Where the system gives fewer threads than wanted, it takes longer, no more.
  bool start_one() {
    try {
      threads_.emplace_back([this] { work_.run(); });
      return true;
    } catch (const std::system_error&) {
      return false;
    }
  }

  Work& work_;
  std::vector<std::jthread> threads_;
};

}  // namespace

int touch_pages(std::byte* data, std::size_t bytes, int advice) {
  if (madvise(data, bytes, advice) == 0) return 0;
  if (errno != EINVAL && errno != ENOSYS) return errno;
  std::memset(data, 0, bytes);
  return 0;
}

void touch_pages_or_throw(const char* function, std::byte* data, std::size_t bytes) {
  const int error = touch_pages(data, bytes);
  if (error == 0) return;
  throw HostMemoryError(message(function, "the kernel could not give ", bytes,
                                " B more: ", std::generic_category().message(error),
                                "; free some or ask for less"));
}

void touch_parts(std::span<const MemoryPart> parts, const Touch& touch,
                 const std::function<void(std::size_t)>& touched) {
  const std::vector<MemoryPart> pieces = cut(parts);
  std::size_t total = 0;
  for (const MemoryPart& piece : pieces) total += piece.bytes;
  std::size_t done = 0;
  const auto report = [&](const MemoryPart& piece) {
    done += piece.bytes;
    if (touched) touched(done);
  };
  if (total <= kPiece) {
    for (const MemoryPart& piece : pieces) {
      touch(piece.data, piece.bytes);
      report(piece);
    }
    return;
  }
  const std::size_t cores = std::max(1U, std::thread::hardware_concurrency());
  Work work(pieces, touch);
  const Workers workers(work, std::min({pieces.size(), cores, kMaxThreads}));
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    work.wait(i);
    report(pieces[i]);
  }
}

}  // namespace sparse_kvcm
