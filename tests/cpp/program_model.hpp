// An executable model of the contract of KvCacheManager, KvCache and Batch (the public headers and
// SPARSE_ATTENTION_DESIGN.md), written without a look at the implementation. It knows what every
// call may refuse and what every accepted call does to lengths, watermarks, windows, leases, pages,
// rows, clocks and errors. It does not move bytes: the driver does, and asks the model which unit
// must lie where.
//
// Where the contract leaves the engine a choice (which page, which slots), the driver tells the
// model what the engine chose, and the model says whether that is allowed.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "sparse_kvcm/kv_cache_manager.hpp"
#include "unit_bytes.hpp"

namespace sparse_kvcm::testing {

// Exceptions that a call must throw: any one of the set; none = the call succeeds.
using Refusals = std::uint32_t;
inline constexpr Refusals kNone = 0;
inline constexpr Refusals kArgument = 1;
inline constexpr Refusals kState = 2;
inline constexpr Refusals kPages = 4;

inline constexpr std::int32_t kNobody = -1;

struct ModelRequest {
  std::int32_t id = 0;
  std::int32_t need = 0;
  std::int32_t cached_slots = 0;  // N and W of its leases
  std::int32_t window_slots = 0;
  KvCacheState state = KvCacheState::kSuspended;
  std::int32_t length = 0;
  std::int32_t committed = 0;
  std::int32_t watermark = 0;
  std::int32_t window_begin = 0;
  std::vector<std::int32_t> pages;  // as the engine chose them
  std::optional<Lease> lease;       // as the engine chose it
  std::int32_t batch = kNobody;     // where it sits
  std::int32_t row = kNobody;
  std::int32_t step_batch = kNobody;     // whose open step has it
  std::int32_t seated_before = kNobody;  // the Batch in which it sat last
  bool holds_memory = true;              // false once closed and out of every open step
  std::vector<std::uint32_t> versions;   // of the unit's last write, by ordinal

  [[nodiscard]] bool all_window() const { return cached_slots == 0; }
  [[nodiscard]] UnitTag tag(std::int32_t ordinal) const;
  // The slot of the ring that `ordinal` has.
  [[nodiscard]] std::int32_t ring_slot(std::int32_t ordinal) const;
};

// What launches see of one row: the state of the last publish.
struct DeviceRow {
  std::int32_t request = kNobody;
  RowState state;
  std::size_t num_pages = 0;
  std::uint64_t generation = 0;
  friend bool operator==(const DeviceRow&, const DeviceRow&) = default;
};

struct ModelBatch {
  BatchOptions options;
  std::uint32_t clock = 0;
  bool closed = false;
  bool step_open = false;
  bool device_open = false;
  bool failed_publish = false;         // what the device has is unknown until the next publish
  std::vector<std::int32_t> seats;     // request or kNobody
  std::vector<DeviceRow> device;       // while a step is open: its rows
  std::vector<std::uint8_t> touched;   // a call may have changed the row since the last publish
  std::vector<std::uint8_t> resolved;  // in the open step, [row * groups + group]
  std::vector<std::uint32_t> errors;   // of launches since the last close, [row * groups + group]
  std::uint32_t batch_error = 0;
  StepErrors reported;
};

class Model {
 public:
  explicit Model(const KvCacheManagerConfig& config) : config_(config) {}

  // --- requests ---
  [[nodiscard]] Refusals refuses_create(const KvCacheOptions& options) const;
  std::int32_t create(const KvCacheOptions& options);
  [[nodiscard]] Refusals refuses_resume(std::int32_t i) const;
  [[nodiscard]] bool has_room_for(std::int32_t i) const;  // what resume answers
  void resume(std::int32_t i, const Lease& lease);
  [[nodiscard]] Refusals refuses_suspend(std::int32_t i) const;
  void suspend(std::int32_t i);
  [[nodiscard]] Refusals refuses_import(std::int32_t i, std::int32_t num_units) const;
  void import_history(std::int32_t i, std::int32_t num_units);
  void close(std::int32_t i);

  // --- seats ---
  std::int32_t create_batch(const BatchOptions& options, std::uint32_t clock);
  [[nodiscard]] Refusals refuses_add(std::int32_t b, std::int32_t i,
                                     std::optional<std::int32_t> row) const;
  [[nodiscard]] std::int32_t first_free_row(std::int32_t b) const;  // or kNobody
  void add(std::int32_t b, std::int32_t i, std::int32_t row);
  [[nodiscard]] Refusals refuses_remove(std::int32_t b, std::int32_t i) const;
  void remove(std::int32_t i);
  void close_batch(std::int32_t b);

  // --- steps ---
  [[nodiscard]] Refusals refuses_resize(std::int32_t b, std::span<const RowLength> lengths) const;
  // Whether `result` is right for one row while `free_pages` host pages are free.
  [[nodiscard]] bool allows_resize(const ModelRequest& request, std::int32_t length,
                                   ResizeResult result, std::int64_t free_pages) const;
  void resize(std::int32_t i, std::int32_t length);
  // Of publish, wait_ready, record_read and abort_step: whether a step is (not) open.
  [[nodiscard]] Refusals refuses_publish(std::int32_t b) const;
  [[nodiscard]] Refusals refuses_in_step(std::int32_t b) const;
  [[nodiscard]] Refusals refuses_record(std::int32_t b, std::span<const std::int32_t> rows) const;
  // Watermarks come from the pages that the engine took, see set_pages.
  void publish(std::int32_t b, std::uint32_t version);
  void fail_publish(std::int32_t b);
  // The engine has this watermark after a failed publish. False if the contract does not allow it.
  [[nodiscard]] bool set_watermark(std::int32_t i, std::int32_t watermark);
  void wait_ready(std::int32_t b) { batches_[at(b)].device_open = true; }
  void record_read(std::int32_t b, std::span<const std::int32_t> rows);
  void abort_step(std::int32_t b) { end_step(b, {}); }

  // --- memory ---
  // The engine has these pages for the request. False if the contract does not allow them.
  [[nodiscard]] bool set_pages(std::int32_t i, const std::vector<std::int32_t>& pages);
  [[nodiscard]] Occupancy occupancy() const;
  [[nodiscard]] std::int64_t free_pages() const;
  [[nodiscard]] std::int32_t pages_for(std::int32_t units) const;
  [[nodiscard]] std::vector<std::uint8_t> leased_pages() const;      // [arena_pages], of the arena
  [[nodiscard]] std::vector<std::uint8_t> owned_host_pages() const;  // [host_pages]

  // --- state ---
  [[nodiscard]] const KvCacheManagerConfig& config() const { return config_; }
  [[nodiscard]] std::int32_t num_groups() const {
    return static_cast<std::int32_t>(config_.groups.size());
  }
  [[nodiscard]] std::vector<ModelRequest>& requests() { return requests_; }
  [[nodiscard]] ModelRequest& request(std::int32_t i) { return requests_[at(i)]; }
  [[nodiscard]] ModelBatch& batch(std::int32_t b) { return batches_[at(b)]; }
  [[nodiscard]] const ModelBatch& batch(std::int32_t b) const { return batches_[at(b)]; }
  [[nodiscard]] std::int32_t num_batches() const {
    return static_cast<std::int32_t>(batches_.size());
  }
  // Index of a row and group into `resolved` and `errors`.
  [[nodiscard]] std::size_t cell(std::int32_t row, std::int32_t group) const;

 private:
  static std::size_t at(std::int32_t i) { return static_cast<std::size_t>(i); }
  void touch(std::int32_t i);
  void end_step(std::int32_t b, std::span<const std::int32_t> committed_rows);
  void raise_watermark(ModelRequest& request) const;

  KvCacheManagerConfig config_;
  std::vector<ModelRequest> requests_;
  std::vector<ModelBatch> batches_;
};

}  // namespace sparse_kvcm::testing
