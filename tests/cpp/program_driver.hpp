// Runs one random program against the engine and the model (program_model.hpp) side by side, and
// plays the rest of an inference engine: it selects, writes new units into the arena, and checks
// after every call what the contract promises: results, refusals, lengths, memory, and every byte
// that attention would read.
//
// A program is a function of its seed alone, on every device. On a GPU it waits for the device
// after each call.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "faulty_backend.hpp"
#include "program_launch.hpp"
#include "program_model.hpp"
#include "snapshot.hpp"
#include "unit_bytes.hpp"

namespace sparse_kvcm::testing {

// Faults of a client, to show that the checks see them.
enum class Sabotage : std::uint8_t {
  kNothing,
  kSkipMiss,        // one miss of a launch is not fetched
  kWrongWriteSlot,  // a new unit goes to its neighbour's slot
  kLeaderOnly,      // a new unit is written in the leader alone
  kForgetWrite,     // a new unit is written nowhere
};

// Situations that the programs must come through, each many times; see program_test.cpp.
enum class Situation : std::uint8_t {
  kCommit,
  kCommitOfSeveralUnits,
  kStepWithoutGrowth,
  kRowLeftOut,
  kAbort,
  kAbortBeforeWaitReady,
  kAbortAfterResolve,
  kAbortAfterPartialWrite,
  kHit,
  kMiss,
  kWindowRead,
  kWindowReadBelowWatermark,
  kAllWindow,
  kDuplicate,
  kOutOfRange,
  kPadding,
  kInvalidRow,
  kStaleClosed,
  kStaleTwice,
  kPastNeed,
  kPastWindow,
  kPastNewUnits,
  kLateFlush,
  kResumeRefused,
  kRelease,
  kSuspendWithWindow,
  kSuspendRefusedInStep,
  kSuspendOutOfPages,
  kImport,
  kImportWhileActive,
  kImportOutOfPages,
  kCloseInStep,
  kRemoveInStep,
  kAddInStep,
  kMoveToOtherBatch,
  kBatchClosedInStep,
  kRefused,
  kSeveralLaunchesPerGroup,
  kOwnOutputs,
  kFailedPublish,
  kFailedCall,
  kCount
};

[[nodiscard]] const char* name_of(Situation situation);

struct ProgramCounts {
  std::array<std::int64_t, static_cast<std::size_t>(Situation::kCount)> seen{};
  std::int64_t sabotaged = 0;
  void add(const ProgramCounts& other);
};

struct ProgramOptions {
  Device device;
  std::uint64_t seed = 0;
  Sabotage sabotage = Sabotage::kNothing;
  bool trace = false;
};

struct ProgramResult {
  std::string failure;  // empty = passed
  std::string trace;    // the calls, one a line
};

class Program {
 public:
  explicit Program(const ProgramOptions& options);
  ProgramResult run();
  [[nodiscard]] const ProgramCounts& counts() const { return counts_; }

 private:
  struct Mismatch : std::runtime_error {
    using std::runtime_error::runtime_error;
  };

  // --- program_driver.cpp: the program ---
  void play();
  void one_operation();
  void misuse(std::int32_t b);
  [[nodiscard]] std::int32_t pick_request();  // or kNobody
  [[nodiscard]] std::int32_t pick_batch();

  // --- program_requests.cpp: calls that take no part in a step ---
  void make_batch();
  void admit();
  std::int32_t create_request();  // or kNobody
  void import_history(std::int32_t i);
  void resume(std::int32_t i);
  void suspend(std::int32_t i);
  void close_request(std::int32_t i);
  void add(std::int32_t b, std::int32_t i);
  void remove(std::int32_t b, std::int32_t i);
  void close_batch(std::int32_t b);

  // --- program_step.cpp: steps ---
  void finish_step(std::int32_t b);
  void advance(std::int32_t b);
  void resize(std::int32_t b);
  void publish(std::int32_t b);
  void failed_publish(std::int32_t b);
  void check_uploaded(std::int32_t b, const std::vector<std::int32_t>& uploaded,
                      const ModelBatch& before);
  void wait_ready(std::int32_t b);
  void record_read(std::int32_t b);
  void record_badly(std::int32_t b);
  void abort_step(std::int32_t b);
  void take_errors(std::int32_t b);
  void after_step(const std::vector<DeviceRow>& rows, Situation how);
  void count_abort(std::int32_t b);
  [[nodiscard]] std::vector<std::int32_t> rows_to_commit(std::int32_t b);
  [[nodiscard]] bool has_unfetched(std::int32_t b) const;
  [[nodiscard]] std::vector<std::int32_t> groups_to_resolve(std::int32_t b) const;

  // --- program_launches.cpp: what lies between wait_ready and record_read ---
  void next_of_launches(std::int32_t b);
  void resolve(std::int32_t b, std::int32_t group);
  [[nodiscard]] std::vector<std::int32_t> pick_rows(std::int32_t b, std::int32_t group);
  [[nodiscard]] std::int32_t pick_ordinal(const RowState& state);
  [[nodiscard]] Launch prepare(std::int32_t b, std::int32_t group);
  void expect_row(std::int32_t b, Launch& launch, std::int32_t i, const Residents& before);
  void expect_blank(const ModelBatch& batch, const Launch& launch, std::int32_t i,
                    std::uint32_t error);
  void expect_selected(std::int32_t b, Launch& launch, std::int32_t i, const Residents& before);
  void expect_misses(const ResolveOutputs& out, const Launch& launch, std::int32_t i,
                     const Residents& chosen, const Residents& before);
  [[nodiscard]] Residents residents(std::int32_t request, std::int32_t group);

  // --- program_writes.cpp: the attention client ---
  void fetch(std::int32_t b, Launch& launch);
  void write(std::int32_t b, Launch& launch);
  void write_unit(const ModelRequest& request, std::int32_t group, std::int32_t slot,
                  std::int32_t ordinal);
  void check_reads(std::int32_t b, const Launch& launch);

  // --- program_checks.cpp ---
  void sync();  // after every call: takes over what the engine chose and compares the rest
  void compare_request(std::int32_t i);
  void compare_batch(std::int32_t b);
  void poison_what_was_freed();
  void poison_what_is_free();
  void check_device_rows(std::int32_t b);
  void check_lease(std::int32_t i);
  void check_ring(const ModelRequest& request, std::int32_t end);
  void check_history(const ModelRequest& request);
  void check_entries(const ModelRequest& request);
  void check_everything();
  void poison_unreadable(const ModelRequest& request);
  void close_everything();

  // Calls `call`. If `refusals` is not empty, one of them must be thrown and nothing change.
  enum class Outcome : std::uint8_t { kAccepted, kRefused, kFailed };
  Outcome outcome_of(const char* what, Refusals refusals, const std::function<void()>& call);
  bool accepted(const char* what, Refusals refusals, const std::function<void()>& call) {
    return outcome_of(what, refusals, call) == Outcome::kAccepted;
  }
  // The same while the device may fail half-way. If it does, nothing that the host shows changes
  // (but publish), and the call is made again.
  bool accepted_at_last(const char* what, Refusals refusals, const std::function<void()>& call);
  Refusals thrown_by(const std::function<void()>& call, std::string& message);
  [[nodiscard]] Snapshot snapshot() const;

  void require(bool condition, const char* what) const {
    if (!condition) throw Mismatch(what);
  }
  void count(Situation s) { ++counts_.seen[static_cast<std::size_t>(s)]; }
  void count_if(bool condition, Situation s) {
    if (condition) count(s);
  }
  template <class... Parts>
  void trace(const Parts&... parts) {
    if (options_.trace) ((trace_ << parts << ' '), ...) << '\n';
  }
  static std::size_t at(std::int32_t i) { return static_cast<std::size_t>(i); }
  [[nodiscard]] std::int32_t num_requests() const {
    return static_cast<std::int32_t>(caches_.size());
  }
  [[nodiscard]] std::int32_t num_live() const;
  [[nodiscard]] std::int32_t page() const { return manager_->config().units_per_page(); }

  ProgramOptions options_;
  Random random_;
  std::shared_ptr<FaultyBackend> backend_ = std::make_shared<FaultyBackend>(options_.device);
  std::unique_ptr<KvCacheManager> manager_;
  Model model_;
  UnitBytes bytes_;
  std::vector<std::int64_t> fresh_occupancy_;
  std::vector<KvCachePtr> caches_;
  std::vector<BatchPtr> batches_;
  std::vector<std::vector<Launch>> launches_;  // of the open step, by Batch
  std::vector<std::uint8_t> leased_;           // before the last call
  std::vector<std::uint8_t> owned_;
  std::vector<std::uint8_t> once_leased_;   // arena pages
  std::vector<std::uint64_t> generations_;  // of all leases so far
  std::uint32_t version_ = 0;
  ProgramCounts counts_;
  std::ostringstream trace_;
};

}  // namespace sparse_kvcm::testing
