// The state behind a Batch: seats, the open step, and the device memory that launches read.
//
//   batch_state.cpp    seats, launches, accessors
//   batch_step.cpp     publish, wait_ready, record_read, abort_step
//   error_report.hpp   error words on their way back
//
// Invariants: a row that is not dirty has on the device exactly what its seat says; page table
// elements of a row at and past `published_pages_` are -1 on the device.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <span>
#include <vector>

#include "manager/batch_memory.hpp"
#include "manager/error_report.hpp"
#include "manager/request.hpp"
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

  std::vector<std::int32_t> publish(Stream stream);
  void wait_ready(Stream stream);
  void record_read(std::span<const std::int32_t> rows, Stream stream);
  void abort_step(Stream stream);

  void resolve(std::int32_t group, const std::int32_t* rows, std::int32_t b,
               const std::int32_t* selection, std::int32_t k, std::int64_t selection_stride,
               const ResolveOutputs& outputs, Stream stream);
  void fetch(std::int32_t group, const std::int32_t* rows, std::int32_t b, std::int32_t k,
             const ResolveOutputs& outputs, Stream stream);
  [[nodiscard]] ResolveOutputs outputs(std::int32_t group) const;
  [[nodiscard]] StepErrors take_errors();

  // --- for Request ---
  void mark_dirty(std::int32_t row) { dirty_.insert(row); }
  // Empties the request's seat. REQUIRES: it sits here.
  void detach(Request& request) noexcept;

  [[nodiscard]] const std::shared_ptr<ManagerState>& manager() const { return manager_; }
  [[nodiscard]] const BatchOptions& options() const { return options_; }
  [[nodiscard]] const BatchMemory& memory() const { return memory_; }
  [[nodiscard]] std::uint32_t clock() const { return clock_; }
  [[nodiscard]] bool step_open() const { return step_open_; }
  [[nodiscard]] const std::set<std::int32_t>& dirty() const { return dirty_; }

 private:
  using RequestPtr = std::shared_ptr<Request>;
  struct Flush {
    RequestPtr request;
    std::int32_t watermark = 0;  // once it is done
  };

  void check_open(const char* function) const;
  void check_step(const char* function) const;
  void check_may_sit(const Request& request) const;
  void check_launch(const char* function, std::int32_t group, const std::int32_t* rows,
                    std::int32_t b, std::int32_t k) const;
  std::int32_t seat(const RequestPtr& request, std::int32_t row);
  [[nodiscard]] ResolveOutputs with_defaults(std::int32_t group, ResolveOutputs outputs) const;
  [[nodiscard]] ops::LaunchRows launch_rows(const std::int32_t* rows, std::int32_t b) const;
  [[nodiscard]] ops::LaunchErrors launch_errors(std::int32_t group,
                                                const ResolveOutputs& outputs) const;

  // The parts of publish, in their order.
  void flush(Stream stream);
  void reset_new_leases(Stream stream);
  void upload_rows(Stream stream);
  void open_step(Stream stream) noexcept;
  void close_on_device(Stream stream);
  void end_step(const std::set<std::int32_t>& committed_rows) noexcept;
  // Ends the open step on the host alone.
  void drop_step() noexcept;

  const std::shared_ptr<ManagerState> manager_;
  const BatchOptions options_;
  const std::uint64_t id_;
  BatchMemory memory_;
  ErrorReport errors_;
  std::vector<RequestPtr> seats_;              // [max_rows]
  std::vector<std::int32_t> published_pages_;  // [max_rows]
  std::set<std::int32_t> dirty_;
  std::set<std::int32_t> flush_late_;  // rows whose committed units had no host page yet
  std::vector<RequestPtr> step_;       // [max_rows], seated at publish; empty between steps
  Stream step_stream_ = 0;             // where the open step is read
  std::uint32_t clock_ = 0;
  bool step_open_ = false;
  bool closed_ = false;
};

}  // namespace sparse_kvcm
