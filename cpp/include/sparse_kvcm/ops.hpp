// Stateless operations on memory that the caller owns. The engine's steps run the same operations
// of the same backends.
//
// Every pointer is device memory of `device` unless its comment says "host array" (host memory that
// is read before the call returns). Work is ordered on `stream`; the call returns before a GPU has
// done it, so keep all memory alive until then. No function synchronises or allocates device
// memory, and all but `move_units` and `reset_leases` may be captured in a CUDA graph. From Hopper
// on resolve and fetch are programmatic dependent launches: they wait for all work before them on
// the stream before they touch memory. A kernel behind them that is launched so may begin, up to
// its own wait, while that work still runs.
//
// Host-side arguments that are out of range throw InvalidArgument before anything is launched.
// What only the device can see (an ordinal, a row) goes to error words: RowError and BatchError.
// Thread-safe: no state of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "sparse_kvcm/entry.hpp"
#include "sparse_kvcm/types.hpp"

namespace sparse_kvcm::ops {

// The rows of one launch. `rows` maps launch order to seats; outputs follow launch order.
// -1 is graph padding. A seat may occur once per launch: if it occurs twice, what that row alone
// gives and holds is undefined.
struct LaunchRows {
  const std::int32_t* rows = nullptr;    // [b]
  std::int32_t b = 0;                    // >= 0; 0 is a no-op
  const RowState* row_states = nullptr;  // [num_rows]
  std::int32_t num_rows = 0;
};

// Error words of one launch. `row_errors` collects by seat over launches. It and `batch_error` may
// be nullptr.
struct LaunchErrors {
  std::uint32_t* errors = nullptr;       // [b], bits of RowError; see each function
  std::uint32_t* row_errors = nullptr;   // [num_rows], ORed; seated rows only
  std::uint32_t* batch_error = nullptr;  // [1], bits of BatchError, ORed
};

// Maps each selected unit to an arena slot and updates the cache's entries.
//
// For each launch position i with seat r = rows[i], in this order:
//   r == -1                          padding: slots -1, write slots no_write_slot, counts, error 0
//   r not seated, or no such row     the same, and kBatchErrorRow
//   the row's state is inconsistent  the same, and error kErrorLease
//   step closed or last == clock     the same, and error kErrorStale; state untouched
//   otherwise each selected ordinal o gives
//     -1                             slot -1
//     outside [0, length)            slot -1, kErrorRange
//     in [window_begin, length)      slot base + N + o mod W; no entry is touched
//     in [watermark, window_begin)   slot -1, kErrorHole
//     below both                     a cached slot in [base, base + N): a hit keeps its slot, a
//                                    miss takes a victim's. Duplicates share one slot.
// Entries of selected hits become (clock, resident, o), of misses (clock, not resident, o).
// With M distinct misses the victims are the first M unselected entries by bucket descending, then
// slot ascending; by ascending ordinal the i-th miss takes the i-th victim by ascending slot.
// Unselected entries of age 127 that are not empty are restamped clock - 127. Then last = clock.
// So the result depends on the set of ordinals alone, and is the same on every device.
//
// Every output cell is written by every call, except misses past miss_counts[i].
// REQUIRES: the entries of a lease hold distinct ordinals, as resolve leaves them. Otherwise what
// the row gives is undefined, within its lease.
// A row's state is inconsistent if lease_id >= num_leases, its slots leave [0, num_slots), W < 1,
// N > 65,535, k > N > 0, length > kMaxUnits, not 0 <= committed <= length,
// not 0 <= watermark <= committed, not 0 <= window_begin <= committed, length - window_begin > W,
// length - committed > max_new_units, or N == 0 and window_begin > 0.
struct ResolveParams {
  LaunchRows launch;
  const std::int32_t* selection = nullptr;  // [b, k] ordinals; -1 = unused, anywhere
  std::int64_t selection_stride = 0;        // from row to row, in elements, >= k
  // In [1, kMaxCachedSlots]. A GPU takes as many as fit its shared memory, 4,096 at least; more is
  // InvalidArgument.
  std::int32_t k = 0;
  const StepState* step = nullptr;  // [1]
  Entry* entries = nullptr;         // [num_slots], in and out; only cached slots are used
  std::int64_t num_slots = 0;
  std::uint32_t* last = nullptr;  // [num_leases], in and out; clock of the lease's last resolve
  std::int32_t num_leases = 0;
  std::int32_t max_new_units = 0;        // >= 0, columns of write_slots
  std::int32_t no_write_slot = kNoSlot;  // fills write slots that name no unit (-1 or trash)
  // Of a GPU launch; they change speed, never the result.
  std::int32_t max_units = kMaxUnits;  // no row is expected to be longer; in [1, kMaxUnits]
  std::int32_t threads = 0;            // of a block: 256, 512, or 0 = whichever needs fewer waves
  // Outputs.
  std::int32_t* slots = nullptr;          // [b, k]
  std::int32_t* write_slots = nullptr;    // [b, max_new_units]; column j: unit committed + j
  std::int32_t* miss_ordinals = nullptr;  // [b, k], ascending
  std::int32_t* miss_slots = nullptr;     // [b, k], ascending within a row
  std::int32_t* miss_counts = nullptr;    // [b], distinct
  std::int32_t* hit_counts = nullptr;     // [b], distinct cached hits (window hits not counted)
  LaunchErrors errors;                    // errors[i] is overwritten
};

// One region of one member layer: where its bytes lie in the arena and in a host unit row.
struct Piece {
  std::byte* arena = nullptr;    // region's first byte in page 0 of the member's arena
  std::int64_t page_bytes = 0;   // arena bytes from page to page
  std::int32_t bytes = 0;        // of one unit; also the arena bytes from unit to unit
  std::int32_t host_offset = 0;  // within the host unit row, in bytes
};

// The bytes of one selection group, arena side and host side.
struct GroupMemory {
  std::span<const Piece> pieces;     // host array, 1 to kMaxPieces
  std::byte* host = nullptr;         // [num_host_pages, units_per_page, host_unit_bytes],
                                     // mapped device address
  std::int64_t host_unit_bytes = 0;  // stride from unit to unit
  std::int64_t num_host_pages = 0;
  std::int64_t num_slots = 0;       // of each member's arena
  std::int32_t units_per_page = 0;  // >= 1, the same on both sides
};

// Copies every miss of a launch from host history to its slot, for all member layers at once.
// Reads nothing at or above a row's watermark. A miss is skipped, and the rest of the row copied,
// for the first that holds of: a negative ordinal (kErrorRange), one at or above the watermark
// (kErrorHole), a slot outside the arena (kErrorLease), no page (kErrorPage: past max_pages, or an
// id outside [0, num_host_pages)). Padding rows are skipped; unseated and invalid ones too, with
// kBatchErrorRow.
// While `step` is closed every seated row gives kErrorStale and nothing is copied: an old miss list
// may name slots that are another request's by now.
struct FetchParams {
  LaunchRows launch;
  const StepState* step = nullptr;              // [1], or nullptr = not asked
  const std::int32_t* miss_ordinals = nullptr;  // [b, k]
  const std::int32_t* miss_slots = nullptr;     // [b, k]
  const std::int32_t* miss_counts = nullptr;    // [b], clamped to [0, k]
  std::int32_t k = 0;                           // b * k < 2^31
  const std::int32_t* page_table = nullptr;     // [num_rows, max_pages] host page ids, -1 = none
  std::int64_t max_pages = 0;
  GroupMemory memory;
  LaunchErrors errors;  // errors[i] is ORed
  // [2] words of scratch: zero before, zero after, and of one launch at a time. A GPU shares the
  // work out by them, and leaves misses out if they are not zero before. Without (nullptr) it
  // copies the same, up to 1.4 times as slowly where misses lie far apart.
  std::uint32_t* cursor = nullptr;
};

// One unit to move: its arena slot and its host unit.
struct UnitMove {
  std::int64_t host_unit = 0;
  std::int32_t slot = 0;
};

enum class MoveDirection : std::uint8_t { kArenaToHost, kHostToArena };

// Copies units between arena and host history: flush (arena to host) and load (host to arena), for
// several groups at once. Destinations must be distinct; their order is free.
struct MoveParams {
  std::span<const UnitMove> moves;      // host array; each within the arena and the host pool
  std::span<const GroupMemory> groups;  // host array
  MoveDirection direction = MoveDirection::kArenaToHost;
};

// Puts slots into the form that an attention kernel wants:
//   out = first + (slot / units_per_page) * page_stride + (slot % units_per_page) * unit_stride
// and -1 stays -1. With page_stride = units_per_page and unit_stride = 1 it is the flat form
// page * page_size + offset. Strides and `first` are >= 0.
// If `selection` is given, a position i, j of a seated row with an ordinal in [0, length of the
// row) and slot -1 gives kErrorUncovered, and an invalid row kBatchErrorRow. Without it, rows are
// unknown: only errors[i] is written, if given.
struct ConvertParams {
  const std::int32_t* slots = nullptr;  // [b, k]
  std::int32_t b = 0;
  std::int32_t k = 0;
  std::int32_t units_per_page = 0;
  std::int64_t page_stride = 0;  // in the caller's unit: rows, elements or bytes
  std::int64_t unit_stride = 0;
  std::int64_t first = 0;
  // Exactly one of the two outputs. With out32, a value that does not fit is the caller's fault:
  // strides and num_slots are checked against it.
  std::int32_t* out32 = nullptr;            // [b, k]
  std::int64_t* out64 = nullptr;            // [b, k]
  std::int64_t num_slots = 0;               // every slot is below it; else -1 and kErrorLease
  const std::int32_t* selection = nullptr;  // [b, k] or nullptr = no check
  std::int64_t selection_stride = 0;
  LaunchRows launch;    // with `selection` only
  LaunchErrors errors;  // errors[i] is ORed; may be empty without `selection`
};

// A lease whose cached slots become empty, and whose `last` becomes `clock`.
struct LeaseReset {
  std::int32_t lease_id = 0;
  std::int32_t base = 0;
  std::int32_t cached_slots = 0;
};

struct ResetParams {
  std::span<const LeaseReset> leases;    // host array
  std::span<Entry* const> entries;       // host array [num_groups] of device [num_slots]
  std::span<std::uint32_t* const> last;  // host array [num_groups] of device [num_leases]
  std::int64_t num_slots = 0;
  std::int32_t num_leases = 0;
  std::uint32_t clock = 0;
};

void resolve(Device device, const ResolveParams& params, Stream stream);
void fetch(Device device, const FetchParams& params, Stream stream);
void move_units(Device device, const MoveParams& params, Stream stream);
void convert(Device device, const ConvertParams& params, Stream stream);
void reset_leases(Device device, const ResetParams& params, Stream stream);

}  // namespace sparse_kvcm::ops
