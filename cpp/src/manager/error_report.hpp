// Brings the error words of closed steps back to the host, without making it wait.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "manager/batch_memory.hpp"
#include "manager/manager_state.hpp"

namespace sparse_kvcm {

class ErrorReport {
 public:
  ErrorReport(const ManagerState& manager, const BatchMemory& memory, std::int32_t max_rows);

  // Copies the words out and sets them and the cursors behind them to zero, in the order of
  // `stream`.
  // `clock` is the step's.
  // Throws what the backend throws; the words then come with a later report.
  void collect(std::uint32_t clock, Stream stream);
  // What has arrived since the last call.
  [[nodiscard]] StepErrors take();

 private:
  struct Report {
    std::uint32_t clock = 0;
    BufferPtr words;
    EventPtr arrived;
  };
  void decode(const Report& report, StepErrors& errors) const;

  Backend& backend_;
  std::uint32_t* device_words_;  // [num_groups, max_rows] and the batch error
  std::size_t report_bytes_;     // of them
  std::size_t step_bytes_;       // of them and the cursors
  std::int32_t num_groups_;
  std::int32_t max_rows_;
  std::deque<Report> pending_;    // oldest first
  std::vector<BufferPtr> spare_;  // pinned
};

}  // namespace sparse_kvcm
