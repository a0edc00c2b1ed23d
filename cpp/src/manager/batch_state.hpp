// The state behind a Batch: seats, the open step, and the device memory that launches read.
//
//   batch_state.cpp    seats
//   batch_resize.cpp   lengths of rows
//   batch_publish.cpp  what a publish sends
//   batch_step.cpp     publish, wait_ready, record_read, abort_step
//   batch_launch.cpp   resolve, fetch
//   error_report.hpp   error words on their way back
//
// Invariants: a row that is not dirty has on the device exactly what its seat says; table entries
// of a row at and past `published` are -1 on the device; rows in `whole_` may have anything there.
//
// A step takes those that sat at its publish: the seats with joined <= steps_, and `left_`, who
// have left theirs since. No list of them is made, so that a publish costs what changed and no
// more.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "manager/batch_memory.hpp"
#include "manager/error_report.hpp"
#include "manager/request.hpp"
#include "manager/row_set.hpp"
#include "manager/table_patch.hpp"
#include "sparse_kvcm/batch.hpp"

namespace sparse_kvcm {

class BatchState {
 public:
  // REQUIRES: checked options.
  BatchState(std::shared_ptr<ManagerState> manager, const BatchOptions& options);

  std::int32_t add(const std::shared_ptr<Request>& request);
  std::int32_t add(const std::shared_ptr<Request>& request, std::int32_t row);
  void remove(const Request& request);
  void close() noexcept;
  std::vector<ResizeResult> resize(std::span<const RowLength> lengths);
  std::vector<ResizeResult> resize_tokens(std::span<const RowTokens> capacities, Stream stream);

  std::vector<std::int32_t> publish(Stream stream);
  void wait_ready(Stream stream);
  void record_read(std::span<const std::int32_t> rows, Stream stream);
  void abort_step(Stream stream);

  void resolve(std::int32_t group, const std::int32_t* rows, std::int32_t b,
               const std::int32_t* selection, std::int32_t k, std::int64_t selection_stride,
               const ResolveOutputs& outputs, Stream stream);
  // `layers`: none = all.
  void fetch(std::int32_t group, const std::int32_t* rows, std::int32_t b, std::int32_t k,
             std::span<const std::int32_t> layers, const ResolveOutputs& outputs, Stream stream);
  [[nodiscard]] ResolveOutputs outputs(std::int32_t group) const;
  [[nodiscard]] StepErrors take_errors();

  // --- for Request ---
  void mark_dirty(std::int32_t row) { dirty_.insert(row); }
  // Empties the request's seat. REQUIRES: it sits here.
  void detach(Request& request) noexcept;
  // Of a request that sits here, whether it did at the open step's publish.
  [[nodiscard]] bool has_in_step(const Request& request) const {
    return step_open_ && request.joined <= steps_;
  }
  // Grows a seated row and marks what that changes.
  ResizeResult resize_row(std::int32_t row, const Request::Target& target, Stream stream);

  [[nodiscard]] const std::shared_ptr<ManagerState>& manager() const { return manager_; }
  [[nodiscard]] const BatchOptions& options() const { return options_; }
  [[nodiscard]] const BatchMemory& memory() const { return memory_; }
  [[nodiscard]] std::uint32_t clock() const { return clock_; }
  [[nodiscard]] bool step_open() const { return step_open_; }
  [[nodiscard]] const RowSet& dirty() const { return dirty_; }
  [[nodiscard]] const std::vector<std::int32_t>& table_rows() const { return table_rows_; }

 private:
  using RequestPtr = std::shared_ptr<Request>;
  struct Flush {
    Request* request = nullptr;
    std::int32_t watermark = 0;  // once it is done
  };
  struct Left {
    RequestPtr request;
    std::int32_t row = 0;  // that it had
  };

  void check_open(const char* function) const;
  void check_step(const char* function) const;
  void check_may_sit(const Request& request) const;
  // By member layer, whether `layers` names it; none = all. Throws as Batch::fetch.
  [[nodiscard]] std::vector<bool> wanted_members(std::int32_t group,
                                                 std::span<const std::int32_t> layers) const;
  void check_launch(const char* function, std::int32_t group, const std::int32_t* rows,
                    std::int32_t b, std::int32_t k) const;
  void check_resize(const char* function) const;
  [[nodiscard]] Request& seated_row(const char* function, std::int32_t row);
  std::int32_t seat(const RequestPtr& request, std::int32_t row);
  [[nodiscard]] ResolveOutputs with_defaults(std::int32_t group, ResolveOutputs outputs) const;
  [[nodiscard]] ops::LaunchRows launch_rows(const std::int32_t* rows, std::int32_t b) const;
  [[nodiscard]] ops::LaunchErrors launch_errors(std::int32_t group,
                                                const ResolveOutputs& outputs) const;

  // The parts of publish, in their order.
  void plan_flush();
  void plan_resets();
  void plan_upload();
  // False where the device has all of it.
  bool patch_tables(std::int32_t row, const Request* request);
  bool patch_table(std::int32_t layer_group, std::int32_t row, const Request* request);
  void send(Stream stream);
  void finish_flush();
  void open_step(Stream stream) noexcept;
  void distrust_device() noexcept;

  void close_on_device(Stream stream);
  [[nodiscard]] bool was_seated_at_publish(std::int32_t row) const;
  // Calls `visit` with each request of the open step.
  template <class Visit>
  void for_each_in_step(Visit visit) const;
  void end_step(const RowSet& committed_rows) noexcept;
  void end_growth(Request& request, Request::Growth growth) noexcept;
  // Ends the open step on the host alone.
  void drop_step() noexcept;

  [[nodiscard]] const RequestPtr& at(std::int32_t row) const {
    return seats_[static_cast<std::size_t>(row)];
  }
  [[nodiscard]] std::int32_t& published(std::int32_t layer_group, std::int32_t row) {
    return published_[static_cast<std::size_t>(layer_group) * seats_.size() +
                      static_cast<std::size_t>(row)];
  }

  const std::shared_ptr<ManagerState> manager_;
  const BatchOptions options_;
  const std::uint64_t id_;
  BatchMemory memory_;
  ErrorReport errors_;
  std::vector<RequestPtr> seats_;        // [max_rows]
  std::vector<std::int32_t> published_;  // [num_layer_groups, max_rows], table entries
  RowSet free_;
  RowSet dirty_;
  RowSet whole_;      // of the dirty ones: their tables go up as a whole
  RowSet unflushed_;  // rows with committed units that are not in host history
  RowSet growing_;    // rows with pending growth
  RowSet named_;      // by the call at hand; empty between calls
  std::vector<Left> left_;
  // Of the publish at hand, kept for their memory.
  TablePatch patch_;
  std::vector<Flush> flushes_;
  std::vector<std::int32_t> table_rows_;
  std::vector<ops::UnitMove> moves_;
  std::vector<ops::LeaseReset> resets_;
  std::uint64_t steps_ = 0;  // publishes so far
  Stream step_stream_ = 0;   // where the open step is read
  std::uint32_t clock_ = 0;
  bool step_open_ = false;
  bool closed_ = false;
};

}  // namespace sparse_kvcm
