// Hands out host page ids so that a request's pages come in runs as long as possible.
//
// Free pages are kept as maximal runs. A request that starts takes the beginning of a run that
// would hold all it may ever need, and the rest of that stretch stays behind its last page as a
// *claimed* run: free, and counted as free, but taken by others only when nothing else is left.
// So requests that grow a page at a time stay contiguous, without reserving memory.
//
// The number of pages has a target. Pages at or beyond it are not handed out; those in use *drain*:
// they stay with their requests and leave the allocator when they are given back.
//
// Invariants: runs are disjoint; two unclaimed runs never touch; a claimed run begins right behind
// the last page of the request that it waits for; no run reaches beyond the target.
// Thread-compatible.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <unordered_map>
#include <vector>

namespace sparse_kvcm {

class PageAllocator {
 public:
  explicit PageAllocator(std::int32_t num_pages);

  // Changes the number of pages. Pages in use keep their ids and their owners.
  void set_target(std::int32_t num_pages);
  [[nodiscard]] std::int32_t target() const { return target_; }
  // Pages in use at or beyond the target.
  [[nodiscard]] std::int32_t num_draining() const;
  // One more than the last page that is in use or below the target.
  [[nodiscard]] std::int32_t extent() const;

  // Appends pages to `pages` until it has `count`, or until no page is free. `expected` is the most
  // that the request may ever have. Returns true if it has `count` now; on false it keeps what
  // there was. Never shrinks.
  bool grow(std::vector<std::int32_t>& pages, std::int32_t count, std::int32_t expected);

  // Makes one more request an owner of `pages`, which are in use: they are free again when each
  // owner has given them back.
  void share(std::span<const std::int32_t> pages);

  // Gives back all but the first `count` pages. No-op if there are no more than that.
  void shrink(std::vector<std::int32_t>& pages, std::int32_t count);

  [[nodiscard]] std::int32_t num_free() const { return num_free_; }

 private:
  struct Run {
    std::int32_t size = 0;
    bool claimed = false;
  };
  using Runs = std::map<std::int32_t, Run>;  // by first page

  std::int32_t take_behind(std::vector<std::int32_t>& pages, std::int32_t count);
  std::int32_t take_fresh(std::vector<std::int32_t>& pages, std::int32_t count,
                          std::int32_t expected);
  [[nodiscard]] Runs::iterator find_fresh(std::int32_t expected);
  [[nodiscard]] Runs::iterator longest_claimed();
  void take_front(Runs::iterator run, std::int32_t count, std::vector<std::int32_t>& pages);
  void insert_free(std::int32_t first, std::int32_t size);
  void insert_drained(std::int32_t first, std::int32_t size);
  void unclaim(std::int32_t first);
  [[nodiscard]] bool has_other_owner(std::int32_t page);

  Runs runs_;
  std::map<std::int32_t, std::int32_t> drained_;  // free at or beyond the target: first -> pages
  std::unordered_map<std::int32_t, std::int32_t> more_owners_;  // page -> owners beside the first
  std::int32_t num_free_;
  std::int32_t target_;
  std::int32_t known_;  // pages that have been below a target; those beyond are in no map
};

}  // namespace sparse_kvcm
