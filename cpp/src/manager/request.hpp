// The state of one request behind its KvCache: lengths, host pages, lease, seat. Batch works on it
// too, so that a request's rules are written once.
//
// Every method that can throw leaves the request as it was.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "manager/manager_state.hpp"
#include "sparse_kvcm/batch.hpp"
#include "sparse_kvcm/kv_cache.hpp"

namespace sparse_kvcm {

class BatchState;

class Request {
 public:
  Request(std::shared_ptr<ManagerState> manager, const KvCacheOptions& options);

  [[nodiscard]] bool resume(Stream stream);
  void suspend(Stream stream);
  void import_history(std::span<const UnitRows> layers, std::int32_t num_units, Stream stream);
  void close() noexcept;

  // --- for Batch ---
  // Sets the length of the next step and takes host pages for it, or says why not.
  [[nodiscard]] ResizeResult resize(std::int32_t new_length);
  // Takes host pages for the committed units as far as there are any, and appends the moves that
  // flush them. Returns the watermark once those moves are done.
  std::int32_t plan_flush(std::vector<ops::UnitMove>& moves);
  // Ends an open step: keeps or drops the pending growth, and frees what a close had to leave.
  void end_step(std::int32_t new_length) noexcept;
  // The window's first ordinal once the present length is published.
  [[nodiscard]] std::int32_t next_window_begin() const;
  [[nodiscard]] RowState row_state() const;
  [[nodiscard]] ops::LeaseReset lease_reset() const;

  [[nodiscard]] bool all_window() const { return lease && lease->cached_slots == 0; }
  [[nodiscard]] const std::shared_ptr<ManagerState>& manager() const { return manager_; }

  const std::int32_t need;
  KvCacheState state = KvCacheState::kSuspended;
  std::int32_t length = 0;
  std::int32_t committed = 0;
  std::int32_t watermark = 0;
  std::int32_t window_begin = 0;
  std::optional<Lease> lease;
  bool reset_pending = false;       // the lease's entries are not empty yet, but must be
  std::vector<std::int32_t> pages;  // host page ids
  std::int32_t stable_pages = 0;    // leading pages that are the same as at the last publish
  BatchState* batch = nullptr;      // where it sits
  std::int32_t row = -1;
  BatchState* step = nullptr;       // whose open step it is in
  std::uint64_t last_batch_id = 0;  // whose clock its entries follow

 private:
  void check_open(const char* function) const;
  void check_not_in_step(const char* function) const;
  void check_import(std::span<const UnitRows> layers, std::int32_t num_units) const;
  void load_window(std::int32_t first, std::int32_t last, Stream stream);
  // The watermark that a flush can reach with the pages that there are.
  [[nodiscard]] std::int32_t reach() const;
  bool take_pages(std::int32_t units);
  void trim_pages(std::int32_t units);
  void leave_seat() noexcept;
  void return_lease() noexcept;

  const std::shared_ptr<ManagerState> manager_;
  const LeaseShape shape_;
};

}  // namespace sparse_kvcm
