// A Batch seats requests in rows and takes them through decode steps together.
//
// One step:
//   add / remove / resize                       between steps, on the host
//   publish(stream)      flushes committed units, raises watermarks, uploads what changed, + 1 on
//                        the clock; opens the step
//   wait_ready(stream)   the stream waits for it and the step opens on the device
//     resolve(group), fetch(group), ...         any number of groups, in a CUDA graph if wanted
//   record_read(rows)    commits the growth of `rows` and closes the step; or
//   abort_step()         after a failed forward: lengths go back, entries are emptied
//
// Rows are seats with holes: a request keeps its row, rows are never compacted, and every device
// address stays the same for the life of the Batch.
//
// Device memory that launches read, besides row_states:
//
//   page tables  int32 [num_layer_groups, max_rows, max_pages]
//                slots, or host page ids of the sparse group; -1 = none, and behind the end
//   page counts  int32 [num_layer_groups, max_rows]
//                entries of each table, 0 if nobody sits there
//
// In a resident manager (config.hpp) no table is sparse, row states name no lease, and nothing is
// resolved or fetched: a step is publish, wait_ready and record_read or abort_step.
//
// What goes up at a publish is proportional to the entries that changed since the last one, also in
// rows that sit there for long: a window that moves on by a page is two entries.
//
// Created by KvCacheManager, which it keeps alive. Many threads may work on one manager, but one at
// a time on a Batch and the requests in it. It does not own its requests.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "sparse_kvcm/config.hpp"
#include "sparse_kvcm/kv_cache.hpp"
#include "sparse_kvcm/ops.hpp"
#include "sparse_kvcm/types.hpp"

namespace sparse_kvcm {

class BatchState;  // src/manager

struct BatchOptions {
  std::int32_t max_rows = 0;   // seats, and the most rows of one launch; in [1, 2^20]
  std::int32_t max_units = 0;  // largest `need` that may be seated; in [1, kMaxUnits]
  // What write slots that name no unit are filled with: -1, or the manager's trash slot for
  // writers that cannot skip.
  std::int32_t no_write_slot = kNoSlot;
};

struct BatchMemoryUse {
  std::int64_t device_bytes = 0;  // seats, page table, error words, resolve's outputs of all groups
  // Pinned host memory: uploads of every row and reports of errors, of two steps in flight. Taken
  // as steps need it, so this is not measured.
  std::int64_t staging_bytes = 0;
  friend bool operator==(const BatchMemoryUse&, const BatchMemoryUse&) = default;
};

// What a Batch of a manager with `config` will take: what its memory_use() says once it is made.
// Takes no memory. Throws InvalidArgument for a bad config or options that create_batch refuses.
[[nodiscard]] BatchMemoryUse planned_batch_memory(const KvCacheManagerConfig& config,
                                                  const BatchOptions& options);

struct RowLength {
  std::int32_t row = 0;
  std::int32_t length = 0;  // in units
};

// The same in tokens, for managers with dense layers: the tokens that there are, with those that
// the next step writes.
struct RowTokens {
  std::int32_t row = 0;
  std::int32_t capacity = 0;
};

enum class ResizeResult : std::uint8_t {
  kOk,
  kPastNeed,      // past the need declared at creation
  kPastWindow,    // past W + the watermark that the next publish will reach: host history is full
  kPastNewUnits,  // more than max_new_units in one step
  kOutOfPages,    // a pool group of dense layers has too few free pages
};

// Where resolve writes and fetch reads: device memory, shapes as in ops::ResolveParams with
// [max_rows, top_k of the group].
struct ResolveOutputs {
  std::int32_t* slots = nullptr;
  std::int32_t* write_slots = nullptr;
  std::int32_t* miss_ordinals = nullptr;
  std::int32_t* miss_slots = nullptr;
  std::int32_t* miss_counts = nullptr;
  std::int32_t* hit_counts = nullptr;
  std::uint32_t* errors = nullptr;
  std::uint32_t* cursor = nullptr;  // [2], as in ops::FetchParams; of its own misses only
};

// What a closed step reported of one row in one group.
struct StepError {
  std::int32_t row = 0;
  std::int32_t group = 0;
  std::uint32_t bits = 0;   // RowError
  std::uint32_t clock = 0;  // of the step in whose report it came
};

struct StepErrors {
  std::vector<StepError> rows;
  std::uint32_t batch = 0;  // BatchError bits, ORed
};

class Batch {
 public:
  // Made by KvCacheManager::create_batch.
  explicit Batch(std::shared_ptr<BatchState> state);
  ~Batch();  // closes
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;

  // --- seats ---
  // Seats an ACTIVE request in the first free row and returns the row. Adding it again returns its
  // row. Allowed during an open step; the row takes part from the next publish on.
  // A lease that was last used in another Batch is emptied, since clocks differ.
  // Throws InvalidState if the request is not ACTIVE, belongs to another manager, sits in another
  // Batch or is in its open step, or no row is free; InvalidArgument if its need exceeds max_units.
  std::int32_t add(KvCache& cache);
  // The same in a given row. Throws InvalidArgument also for a row outside [0, max_rows), every
  // negative one included, or an occupied one; InvalidState if it sits in another row of this
  // Batch.
  std::int32_t add(KvCache& cache, std::int32_t row);
  // Takes the request out of its row; it keeps lease and pending growth. During an open step the
  // step still commits or returns its growth. Throws InvalidState if it does not sit here.
  void remove(KvCache& cache);
  // Detaches every request without closing it; an open step is aborted, in the order of the stream
  // that wait_ready had. Later calls throw InvalidState. No-op if closed. Never throws.
  // REQUIRES: that stream still exists.
  void close() noexcept;

  // --- one step ---
  // Sets the length that the next step will have, per row, and takes host pages for it. A row that
  // cannot have it keeps its length and says why; the others are not affected.
  // Throws InvalidState during an open step; InvalidArgument for a row that is out of range,
  // unseated or named twice, or a length below the committed one.
  // Also InvalidState if the manager has dense layers, whose pages come in stream order.
  std::vector<ResizeResult> resize(std::span<const RowLength> lengths);
  // The same in tokens: the row has pages for `capacity` tokens in every dense layer group, its
  // length is capacity / tokens_per_unit. Pages that windows have left go back, for reuse behind
  // the work that `stream` has now.
  // Throws as resize: for a capacity below history_length(); what the device throws, and then rows
  // named before the one at fault have what they wanted, the others do not.
  std::vector<ResizeResult> resize_tokens(std::span<const RowTokens> capacities, Stream stream);

  // Flushes the committed units of seated rows as far as host pages can be had, raises their
  // watermarks, uploads what changed, and opens a step. Returns the rows uploaded, ascending.
  // Not capturable. Throws InvalidState during an open step, during capture, or if closed. If the
  // device fails, no step is open, the clock is as before and every row is dirty. Changes that come
  // while the step is open stay dirty for the next publish.
  std::vector<std::int32_t> publish(Stream stream);

  // `stream` waits for the last publish and the step opens on the device in its order.
  // Not capturable. Throws InvalidState without an open step or during capture.
  void wait_ready(Stream stream);

  // Resolves the selections of one group; see ops::resolve. `rows` int32 [b] and `selection`
  // int32 [b, k], row stride `selection_stride`, are device memory, b <= max_rows and
  // k <= the group's top_k. Default outputs are the Batch's own; null members of `outputs` fall
  // back to them.
  // Throws InvalidArgument for a bad group, b, k or selection_stride. Launches while no step is
  // open are allowed: the rows then report kErrorStale.
  void resolve(std::int32_t group, const std::int32_t* rows, std::int32_t b,
               const std::int32_t* selection, std::int32_t k, std::int64_t selection_stride,
               const ResolveOutputs& outputs, Stream stream);
  // Fetches the misses of the group's last resolve, from the same rows, k and outputs. While no
  // step is open the rows report kErrorStale and nothing is copied.
  void fetch(std::int32_t group, const std::int32_t* rows, std::int32_t b, std::int32_t k,
             const ResolveOutputs& outputs, Stream stream);
  // The same for some member layers of the group, all of them if `layers` (host array) is empty:
  // one fetches the leader's units, and its followers' while the leader computes. Launches of one
  // group that may run at a time need outputs with cursors of their own.
  // Throws InvalidArgument for a layer that is not the group's or is named twice.
  void fetch(std::int32_t group, const std::int32_t* rows, std::int32_t b, std::int32_t k,
             std::span<const std::int32_t> layers, const ResolveOutputs& outputs, Stream stream);
  [[nodiscard]] ResolveOutputs outputs(std::int32_t group) const;

  // Closes the step: commits the growth of `rows` (host array) in stream order after their reads;
  // rows of the step that it does not name get their lengths back. `rows` must have been resolved,
  // fetched and written in every group; a row that was resolved and then left out keeps entries of
  // units that never came, so abort the step instead. Rows whose request has been closed meanwhile
  // are skipped.
  // Not capturable. Throws InvalidState without an open step or during capture; InvalidArgument for
  // a row that was not seated at publish or is named twice.
  void record_read(std::span<const std::int32_t> rows, Stream stream);
  // Closes the step after a failed forward: every row gets its length back and empty entries;
  // clock and window_begin stay. Not capturable. Throws InvalidState without an open step or during
  // capture.
  void abort_step(Stream stream);

  // --- what the device reported ---
  // Errors of closed steps since the last call, oldest first. Never waits: on a GPU a step's errors
  // arrive once the device has passed its record_read or abort_step.
  // A launch while no step is open reports with the step after it.
  [[nodiscard]] StepErrors take_errors();

  // --- state ---
  [[nodiscard]] std::int32_t max_rows() const;
  [[nodiscard]] std::uint32_t clock() const;
  [[nodiscard]] bool step_open() const;
  [[nodiscard]] std::vector<std::int32_t> dirty_rows() const;  // ascending
  [[nodiscard]] const RowState* row_states_address() const;    // device [max_rows]
  // Rows of which the last publish wrote page tables or counts, ascending: who keeps tables of its
  // own made from these has to look at no others.
  [[nodiscard]] std::vector<std::int32_t> table_rows() const;
  // Of host history, device [max_rows, max_pages]. Throws InvalidState in a resident manager.
  [[nodiscard]] const std::int32_t* page_table_address() const;
  [[nodiscard]] std::int64_t max_pages() const;
  [[nodiscard]] BatchMemoryUse memory_use() const;
  [[nodiscard]] std::int32_t num_layer_groups() const;
  // Of one layer group: device [max_rows, max_pages] and [max_rows]. The sparse one's table is
  // page_table_address(). Throws InvalidArgument for a bad group.
  [[nodiscard]] const std::int32_t* page_table_address(std::int32_t layer_group) const;
  [[nodiscard]] const std::int32_t* page_counts_address(std::int32_t layer_group) const;

  [[nodiscard]] const std::shared_ptr<BatchState>& state() const { return state_; }

 private:
  std::shared_ptr<BatchState> state_;
};

}  // namespace sparse_kvcm
