#include "core/host_mapping.hpp"

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <mutex>
#include <string_view>
#include <system_error>
#include <thread>

#include "core/check.hpp"
#include "core/host_limits.hpp"
#include "core/rounding.hpp"

namespace sparse_kvcm {
namespace {

constexpr const char* kFunction = "allocate_pinned";
constexpr std::size_t kPiece = std::size_t{64} << 20;  // touched at a time by one thread
constexpr std::size_t kMaxThreads = 32;

std::string error_text(int error) { return std::generic_category().message(error); }

// Unlimited is the rule; a limit explains why the kernel has no addresses.
std::string resource_limit(const char* name, int resource) {
  rlimit limit{};
  if (getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return {};
  return std::string(", ") + name + " is " + std::to_string(limit.rlim_cur) + " B";
}

std::byte* map(std::size_t bytes) {
  void* const mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped != MAP_FAILED) return static_cast<std::byte*>(mapped);
  const int error = errno;
  throw HostMemoryError(message(kFunction, "mmap of ", bytes, " B failed: ", error_text(error),
                                resource_limit("RLIMIT_AS (ulimit -v)", RLIMIT_AS),
                                resource_limit("RLIMIT_DATA (ulimit -d)", RLIMIT_DATA),
                                "; raise it or ask for less"));
}

void unmap(std::byte* data, std::size_t bytes) {
  if (bytes > 0) static_cast<void>(munmap(data, bytes));
}

// Maps `bytes`, rounded up to whole pages, at a multiple of kHugePage.
std::byte* map_aligned(std::size_t bytes) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t size = round_up(bytes, page);
  if (size < kHugePage) return map(size);
  std::byte* const mapped = map(size + kHugePage);
  const std::size_t past = reinterpret_cast<std::uintptr_t>(mapped) % kHugePage;
  const std::size_t before = past == 0 ? 0 : kHugePage - past;
  unmap(mapped, before);
  unmap(mapped + before + size, kHugePage - before);
  return mapped + before;
}

// Hands the pieces of a mapping to threads, in ascending order, and knows how many bytes from the
// start have been touched.
class Fill {
 public:
  Fill(std::byte* data, std::size_t bytes)
      : data_(data), bytes_(bytes), touched_(ceil_div(bytes, kPiece)) {}

  [[nodiscard]] std::size_t num_pieces() const { return touched_.size(); }

  // Touches pieces until none is left.
  void work() {
    std::unique_lock lock(mutex_);
    while (error_ == 0 && next_ < touched_.size()) {
      const std::size_t piece = next_++;
      const std::size_t begin = piece * kPiece;
      lock.unlock();
      const int error = touch_pages(data_ + begin, std::min(kPiece, bytes_ - begin));
      lock.lock();
      if (error != 0) error_ = error;
      touched_[piece] = true;
      while (prefix_ < touched_.size() && touched_[prefix_]) ++prefix_;
      changed_.notify_one();
    }
  }

  // Waits until more than the first `done` bytes have been touched, and returns how many have.
  std::size_t wait(std::size_t done) {
    std::unique_lock lock(mutex_);
    const auto bytes = [this] { return std::min(prefix_ * kPiece, bytes_); };
    changed_.wait(lock, [&] { return error_ != 0 || bytes() > done; });
    if (error_ == 0) return bytes();
    throw HostMemoryError(message(kFunction, "the kernel could not give all of ", bytes_,
                                  " B: ", error_text(error_), "; free some or ask for less"));
  }

  // Threads end after the piece that they are at.
  void stop() {
    const std::lock_guard lock(mutex_);
    next_ = touched_.size();
  }

 private:
  std::byte* data_;
  std::size_t bytes_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<bool> touched_;  // by piece
  std::size_t next_ = 0;
  std::size_t prefix_ = 0;  // pieces
  int error_ = 0;
};

// Threads that work on a Fill, until there is nothing to do or this goes.
class Workers {
 public:
  explicit Workers(Fill& fill) : fill_(fill) {
    if (fill.num_pieces() > 1) start();
    if (threads_.empty()) fill.work();
  }
  ~Workers() { fill_.stop(); }
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

 private:
  // Where the system gives fewer threads than wanted, the fill is slower, no more.
  void start() {
    const std::size_t cores = std::max(1U, std::thread::hardware_concurrency());
    const std::size_t wanted = std::min({fill_.num_pieces(), cores, kMaxThreads});
    bool started = true;
    while (started && threads_.size() < wanted) started = start_one();
  }
  bool start_one() {
    try {
      threads_.emplace_back([this] { fill_.work(); });
      return true;
    } catch (const std::system_error&) {
      return false;
    }
  }

  Fill& fill_;
  std::vector<std::jthread> threads_;
};

}  // namespace

int touch_pages(std::byte* data, std::size_t bytes, int advice) {
  if (madvise(data, bytes, advice) == 0) return 0;
  if (errno != EINVAL && errno != ENOSYS) return errno;
  std::memset(data, 0, bytes);
  return 0;
}

HostMapping::HostMapping(std::size_t bytes, int numa_node) : bytes_(bytes), numa_node_(numa_node) {
  if (bytes == 0) return;
  if (bytes > std::numeric_limits<std::size_t>::max() / 2) {
    throw HostMemoryError(message(kFunction, "no machine has ", bytes, " B; ask for less"));
  }
  check_host_memory(kFunction, bytes);
  data_ = map_aligned(bytes);
  try {
    advise();
    if (numa_node != kAnyNode) node_error_ = prefer_node(data_, bytes, numa_node);
  } catch (...) {  // a warning for which there was no memory
    unmap(data_, bytes_);
    throw;
  }
}

HostMapping::~HostMapping() {
  if (owner_ == 0 || owner_ == getpid()) unmap(data_, bytes_);
}

// Where the kernel does not know the advice, a fork costs memory, no more.
void HostMapping::keep_from_children() {
  if (bytes_ == 0) return;
  owner_ = getpid();
  static_cast<void>(madvise(data_, bytes_, MADV_DONTFORK));
}

void HostMapping::fill(const FillProgress& progress) {
  if (bytes_ == 0) return;
  Fill fill(data_, bytes_);
  const Workers workers(fill);
  for (std::size_t done = 0; done < bytes_;) {
    done = fill.wait(done);
    if (progress) progress(static_cast<std::int64_t>(done), static_cast<std::int64_t>(bytes_));
  }
  verify();
}

// Advice: where the kernel does not know it, only the speed is another.
void HostMapping::advise() {
  const char* const value = std::getenv("SPARSE_KVCM_THP");
  const std::string_view wish = value == nullptr ? "" : value;
  if (!wish.empty() && wish != "0" && wish != "1") {
    warnings_.push_back(
        message("SPARSE_KVCM_THP", "must be 0 or 1, got \"", wish, "\"; huge pages are asked for"));
  }
  if (bytes_ < kHugePage) return;
  static_cast<void>(madvise(data_, bytes_, wish == "0" ? MADV_NOHUGEPAGE : MADV_HUGEPAGE));
}

void HostMapping::verify() {
  if (numa_node_ == kAnyNode) return;
  const std::optional<bool> there = is_on_node(data_, bytes_, numa_node_);
  if (there && *there) return;
  const std::string reason =
      node_error_ == 0 ? "" : " (mbind: " + error_text(node_error_) + "; in a container SYS_NICE)";
  warnings_.push_back(message(kFunction,
                              there ? "not all host memory is on the GPU's NUMA node "
                                    : "it is not known whether host memory is on the NUMA node ",
                              numa_node_, reason, "; from another node the link is slower"));
}

}  // namespace sparse_kvcm
