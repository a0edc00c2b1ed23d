// The state of one request behind its KvCache: lengths, pages, lease, seat. Batch works on it too,
// so that a request's rules are written once.
//
//   request.cpp          resume, suspend, close, seats and leases
//   request_length.cpp   resize, flush, the end of a step
//   request_import.cpp   import_history
//   request_receive.cpp  reserve_history, write_history, commit_history
//
// Every method that can throw leaves the request as it was.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "manager/manager_state.hpp"
#include "sparse_kvcm/batch.hpp"
#include "sparse_kvcm/kv_cache.hpp"
#include "sparse_kvcm/request_pages.hpp"

namespace sparse_kvcm {

class BatchState;

class Request {
 public:
  Request(std::shared_ptr<ManagerState> manager, const KvCacheOptions& options);

  [[nodiscard]] bool resume(Stream stream);
  void suspend(Stream stream);
  [[nodiscard]] bool resize(std::int32_t capacity, std::int32_t history_length, Stream stream);
  void import_history(std::span<const UnitRows> layers, std::int32_t num_units, Stream stream);
  [[nodiscard]] bool reserve_history(std::int32_t num_units);
  // Checks, and keeps the pages from others until end_write, or drop_write after a failure.
  [[nodiscard]] std::vector<std::int32_t> begin_write(std::int32_t group,
                                                      const HistoryPages& pages);
  void end_write() noexcept;
  void drop_write(std::int32_t group, const HistoryPages& pages) noexcept;
  void commit_history(Stream stream);
  [[nodiscard]] bool is_receiving() const { return reserved > committed; }
  void close() noexcept;
  void set_index_buffer(std::int32_t layer_group, std::span<std::int32_t> buffer);
  [[nodiscard]] std::vector<std::int32_t> page_indices(std::int32_t layer_group) const;
  [[nodiscard]] std::vector<LayerGroupStatistics> get_and_reset_statistics();

  // --- for Batch ---
  // What the next step has.
  struct Target {
    std::int32_t length = 0;    // units
    std::int32_t capacity = 0;  // tokens
    std::int32_t history = 0;   // tokens
  };
  [[nodiscard]] Target target_units(std::int32_t units) const;
  [[nodiscard]] Target target_tokens(std::int32_t tokens) const;
  // Sets it and takes pages for it, or says why not. REQUIRES: with dense layers, that `stream` has
  // entered the timeline.
  [[nodiscard]] ResizeResult grow(const Target& target, Stream stream);
  // Takes host pages for the committed units as far as there are any, and appends the moves that
  // flush them. Returns the watermark once those moves are done.
  std::int32_t plan_flush(std::vector<ops::UnitMove>& moves);
  // What becomes of the pending growth when a step ends.
  enum class Growth : std::uint8_t { kKeep, kDrop };
  // Ends its part in a step, and frees what a close had to leave.
  void end_step(Growth growth) noexcept;
  [[nodiscard]] bool has_growth() const { return length != committed || tokens != history; }
  // Throws InvalidState unless units, tokens and the pages of dense layers go together.
  void check_may_sit(const char* function) const;
  // The window's first ordinal once the present length is published.
  [[nodiscard]] std::int32_t next_window_begin() const;
  [[nodiscard]] RowState row_state() const;
  [[nodiscard]] ops::LeaseReset lease_reset() const;
  // The Batch in whose open step it is, seated there or not any more; null if none.
  [[nodiscard]] const BatchState* step() const;

  [[nodiscard]] bool all_window() const { return lease && lease->cached_slots == 0; }
  [[nodiscard]] const std::shared_ptr<ManagerState>& manager() const { return manager_; }

  const std::int32_t need;
  KvCacheState state = KvCacheState::kSuspended;
  std::int32_t length = 0;
  std::int32_t committed = 0;
  std::int32_t watermark = 0;
  std::int32_t window_begin = 0;
  std::int32_t tokens = 0;   // as length, in tokens
  std::int32_t history = 0;  // as committed
  std::optional<Lease> lease;
  bool reset_pending = false;           // the lease's entries are not empty yet, but must be
  std::vector<std::int32_t> pages;      // host page ids
  std::int32_t stable_pages = 0;        // leading pages that are the same as at the last publish
  std::unique_ptr<RequestPages> dense;  // of dense layer groups; null if there are none
  BatchState* batch = nullptr;          // where it sits
  std::int32_t row = -1;
  std::uint64_t joined = 0;               // the first step of that Batch in which it takes part
  const BatchState* left_step = nullptr;  // in whose open step it still is, though it left the seat
  std::uint64_t last_batch_id = 0;        // whose clock its entries follow
  std::int32_t reserved = 0;              // units that it receives up to; else 0
  EventPtr reserved_ready;                // behind who used their pages before

 private:
  using Marks = std::vector<bool>::iterator;

  void check_open(const char* function) const;
  void check_not_in_step(const char* function) const;
  void check_not_receiving(const char* function) const;
  void check_reserve(std::int32_t num_units) const;
  void check_write(std::int32_t group, const HistoryPages& pages) const;
  void check_regions(std::int32_t group, const HistoryPages& pages) const;
  // Begin and end of the units of a write.
  [[nodiscard]] std::pair<Marks, Marks> written(std::int32_t group,
                                                const HistoryPages& pages) noexcept;
  void check_resize(std::int32_t capacity, std::int32_t history_length) const;
  void check_import(std::span<const UnitRows> layers, std::int32_t num_units) const;
  void check_import_layers(std::span<const UnitRows> layers, std::int32_t num_units) const;
  [[nodiscard]] std::int32_t dense_history() const;
  void load_window(std::int32_t first, std::int32_t last, Stream stream);
  // The watermark that a flush can reach with the pages that there are.
  [[nodiscard]] std::int32_t reach() const;
  // Host pages, as HostHistory's; all changes of `pages` go through these.
  bool take_pages(std::int32_t units);
  void keep_pages(std::int32_t kept);
  void trim_pages(std::int32_t units);
  void follow_pages(std::size_t before);
  void leave_seat() noexcept;
  void return_lease() noexcept;

  const std::shared_ptr<ManagerState> manager_;
  const LeaseShape shape_;
  std::span<std::int32_t> host_buffer_;     // the index buffer of the sparse layer group
  LayerGroupStatistics host_counter_;       // and its statistics
  std::int32_t num_writers_ = 0;            // calls of write_history that are under way
  std::vector<std::vector<bool>> written_;  // by group, the units from `committed` on
};

}  // namespace sparse_kvcm
