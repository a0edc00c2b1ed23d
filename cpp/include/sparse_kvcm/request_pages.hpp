// RequestPages are the pages of one request, in all layer groups: page tables that follow its
// length. Entry p of a layer group's table is the slot of page p, or -1: not there yet, stale, or
// a scratch page.
//
//   dense, no window   pages [0, ceil(capacity / tokens_per_block))
//   window             of these, without stale ones; those that are stale when the step ends share
//                      scratch slots, if the config has swa_scratch_reuse
//   sparse             host pages for the whole capacity
//
// suspend() moves what a later step can read to host pages and gives every slot on the GPU back;
// resume() brings it back to other slots. In between the tables are -1 throughout.
//
// Pages come and go in stream order: whatever runs on `stream` after a call may use the new ones,
// and what was given up is reused after the work that `stream` had at the call. (Host pages are
// reused at once: whoever writes host history waits for the device first.)
// Made by Storage, which it keeps alive. Thread-safe as it is, except for views of its tables: the
// spans below are for who alone uses the request, and stand until its next change.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "sparse_kvcm/page_index.hpp"
#include "sparse_kvcm/page_range.hpp"
#include "sparse_kvcm/storage.hpp"
#include "sparse_kvcm/types.hpp"

namespace sparse_kvcm {

class Event;  // src/backend
enum class PageDirection : std::uint8_t;
class PageMigration;  // src/storage
class StorageState;

// Which layer groups a RequestPages takes care of. kDense leaves the sparse one to its caller.
enum class PageScope : std::uint8_t { kAll, kDense };

// What a resize makes of the step at hand. kRedone: it may be planned anew, with the history_length
// that it had; what it wrote does not count.
enum class StepAtHand : std::uint8_t { kComputed, kRedone };

class RequestPages {
 public:
  RequestPages(std::shared_ptr<StorageState> storage, std::int32_t expected_length,
               PageScope scope = PageScope::kAll);
  ~RequestPages();  // as close()
  RequestPages(const RequestPages&) = delete;
  RequestPages& operator=(const RequestPages&) = delete;

  [[nodiscard]] std::int32_t capacity() const;
  [[nodiscard]] std::int32_t history_length() const;

  // Moves on: `history_length` tokens are computed, the next step writes [history_length,
  // capacity).
  // Stale pages go before new ones are taken, so a window never needs more than its floor. Returns
  // false, and changes nothing, if a pool group has too few free slots.
  // Throws InvalidArgument unless history_length is in [history_length(), capacity] and, while
  // pages are in scratch, in [capacity() - max_rewind_len, capacity()] (or history_length(), if the
  // step is redone), or if an index buffer is too short; InvalidState once closed, while suspended
  // and while `stream` is being captured, as drop_step.
  [[nodiscard]] bool resize(std::int32_t capacity, std::int32_t history_length, Stream stream,
                            StepAtHand step = StepAtHand::kComputed);

  // Whether there is a page for everything that `history_length` tokens leave readable. Not for
  // what the step at hand has in scratch.
  [[nodiscard]] bool holds(std::int32_t history_length) const;

  // The step at hand did not happen: capacity becomes history_length, its pages and scratch go
  // back.
  // What comes before a suspension. Throws InvalidState once closed.
  void drop_step(Stream stream);

  // Drops the step at hand, copies the dense pages that `history_length` tokens leave readable to
  // host pages, and gives their slots back; host history stays where it is. All of them or, if the
  // host has too few pages or there is no host tier, none: false then.
  // Throws InvalidState as resize, and what the device throws; nothing has changed then.
  [[nodiscard]] bool suspend(Stream stream);
  // The way back. False, and nothing changed, if a pool group on the GPU has too few free slots or
  // would be used beyond max_util_for_resume. True if not suspended.
  [[nodiscard]] bool resume(Stream stream);
  [[nodiscard]] bool is_suspended() const;

  // Gives everything back, for reuse after the work that `stream` had. Where the device cannot say
  // when that is over, because it fails or the stream is being captured, slots stay out of use
  // until it can: later calls ask it again, so the stream must be there until then. No-op if
  // closed.
  void close(Stream stream) noexcept;
  void close() noexcept;  // on the stream of the last call that changed something

  // The page table of a layer group, [ceil(capacity / tokens_per_block)].
  // Throws InvalidArgument for an unknown group, as all below.
  [[nodiscard]] std::span<const std::int32_t> get_base_page_indices(std::int32_t layer_group) const;
  [[nodiscard]] std::vector<std::int32_t> copy_of_base_page_indices(std::int32_t layer_group) const;
  // The same as the first entries of `indices`, -1 in all others. Throws InvalidArgument if it is
  // shorter than the table.
  void copy_base_page_indices(std::int32_t layer_group, std::span<std::int32_t> indices) const;

  // Keeps `buffer` equal to the table: its first entries, and -1 behind them, from now on until it
  // is replaced, by an empty one for instance. Throws InvalidArgument if it is shorter than the
  // table.
  // REQUIRES: it lives until then, or until close or drop_index_bufs, which leave -1 in it.
  void set_base_page_index_buf(std::int32_t layer_group, std::span<std::int32_t> buffer);
  void drop_index_bufs() noexcept;

  // Pages whose entries changed since the last forget_changes(), as they did, while track_changes
  // is on; it begins with none. May name pages past the end of the table.
  void track_changes(bool on);
  [[nodiscard]] std::span<const std::int32_t> changes(std::int32_t layer_group) const;
  void forget_changes();

  // Of this request, as Storage::get_and_reset_statistics. [num_layer_groups]
  [[nodiscard]] std::vector<LayerGroupStatistics> get_and_reset_statistics();

  // Pages of the open step that are in scratch, empty if none is, and what they share.
  [[nodiscard]] PageRange get_swa_scratch_range(std::int32_t layer_group) const;
  [[nodiscard]] std::span<const std::int32_t> get_scratch_slots(std::int32_t layer_group) const;
  [[nodiscard]] std::vector<std::int32_t> copy_of_scratch_slots(std::int32_t layer_group) const;
  [[nodiscard]] bool has_scratch_slots() const;

  // Whether later steps put pages in scratch. On at first if the config has swa_scratch_reuse.
  // Throws InvalidArgument when switched on without it, or off while there are scratch pages.
  [[nodiscard]] bool enable_swa_scratch_reuse() const;
  void set_enable_swa_scratch_reuse(bool enable);

 private:
  friend class PageMigration;

  struct HostPage {
    std::int32_t page = 0;
    std::int32_t slot = 0;  // in the cold pool group
  };
  struct Table {
    std::vector<std::int32_t> slots;  // [pages], -1 = none
    PageRange scratch;
    std::vector<std::int32_t> scratch_slots;
    std::vector<HostPage> host_pages;  // while suspended
    std::vector<std::int32_t> changes;
    std::span<std::int32_t> buffer;
  };
  struct Plan;

  [[nodiscard]] std::unique_lock<std::mutex> lock() const;
  [[nodiscard]] bool migrate(PageDirection direction, Stream stream);
  void check_usable(const char* function, Stream stream) const;
  void check_resize(std::int32_t capacity, std::int32_t history_length, Stream stream,
                    StepAtHand step) const;
  [[nodiscard]] bool keeps_tables(KvCacheDesc request) const;
  [[nodiscard]] bool move(std::int32_t capacity, std::int32_t history_length, Stream stream);
  [[nodiscard]] std::int32_t hopeless_group(KvCacheDesc request) const;
  [[nodiscard]] bool plan_group(std::int32_t layer_group, KvCacheDesc request, Plan& plan,
                                Stream stream);
  [[nodiscard]] Plan plan_table(std::int32_t layer_group, KvCacheDesc request) const;
  void plan_scratch(std::int32_t layer_group, Plan& plan) const;
  [[nodiscard]] bool take_slots(std::int32_t layer_group, Plan& plan, Stream stream);
  [[nodiscard]] bool grow_sparse(std::int32_t layer_group, std::int32_t capacity);
  void commit(std::vector<Plan>& plans, std::int32_t capacity, Stream stream);
  void apply(Table& table, const Plan& plan);
  void set_entry(Table& table, std::int32_t page, std::int32_t slot);
  void set_size(Table& table, std::int32_t pages);
  void undo(std::vector<Plan>& plans);
  void count(std::int32_t layer_group, const LayerGroupStatistics& more);
  void close_on(Stream stream);
  void drop_buffers();
  [[nodiscard]] bool any_scratch() const;
  static void write(const Table& table, std::span<std::int32_t> indices);
  [[nodiscard]] const Table& table(const char* function, std::int32_t layer_group) const;
  [[nodiscard]] bool is_sparse(std::int32_t layer_group) const;
  // Of a layer group that is the caller's.
  [[nodiscard]] bool is_left_out(std::int32_t layer_group) const;
  [[nodiscard]] static std::int64_t num_slots(const Table& table);

  std::shared_ptr<StorageState> storage_;
  std::vector<Table> tables_;                   // [num_layer_groups]
  std::vector<LayerGroupStatistics> counters_;  // [num_layer_groups]
  std::int32_t expected_length_;
  PageScope scope_;
  std::int32_t capacity_ = 0;
  std::int32_t history_length_ = 0;
  bool scratch_reuse_;
  bool track_changes_ = false;
  bool suspended_ = false;
  bool closed_ = false;
  Stream last_stream_ = 0;
  std::shared_ptr<const Event> host_ready_;  // behind the copies to host pages
};

}  // namespace sparse_kvcm
