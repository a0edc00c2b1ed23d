// The vocabulary of sparse_kvcm: ids, limits, row state and error words.
//
//   unit       what a selection names; `ordinal` is its index in the request
//   slot       one unit's place in the arena, counted over all leases:
//              page * units_per_page + offset
//   host unit  one unit's place in host history: page id * units_per_page + offset
//   page       `units_per_page` consecutive units, in the arena or in host history
//   lease      one request's slots: `cached_slots` (N) that resolve manages, then
//              `window_slots` (W)
//   row        a seat in a Batch
//
// "Block" is a CUDA thread block here and nothing else, except in `tokens_per_block`, the name
// that the field gives to the page size.
#pragma once

#include <cstdint>
#include <string>

namespace sparse_kvcm {

// Most units a request may have. An ordinal takes 24 bits of an entry, and the pattern of 24 ones
// belongs to the empty entry.
inline constexpr std::int32_t kMaxUnits = (1 << 24) - 1;
// Most cached slots of one lease (N).
inline constexpr std::int32_t kMaxCachedSlots = 65'535;
// Most rows of a Batch.
inline constexpr std::int32_t kMaxRows = 1 << 20;
// Most tokens of a page.
inline constexpr std::int32_t kMaxPageTokens = 65'536;
// Most pages of host history, and most slots of an arena, its trash page included: they have
// numbers of 31 bits.
inline constexpr std::int32_t kMaxHostPages = 0x7FFFFFFF;
inline constexpr std::int32_t kMaxArenaSlots = 0x7FFFFFFF;
// Most bytes of a tier.
inline constexpr std::int64_t kMaxTierBytes = std::int64_t{1} << 60;
// Most pieces, member layers times regions, that one selection group may have.
inline constexpr std::int32_t kMaxPieces = 64;

inline constexpr std::int32_t kNoSlot = -1;
inline constexpr std::int32_t kNoPage = -1;
inline constexpr std::int32_t kPaddingRow =
    -1;  // an entry of `rows` that only fills a graph's shape

enum class DeviceKind : std::uint8_t { kCpu, kCuda };

// The device that holds an arena. `index` is 0 on the CPU.
struct Device {
  DeviceKind kind = DeviceKind::kCpu;
  std::int32_t index = 0;
  friend bool operator==(const Device&, const Device&) = default;
};

// "cpu" or "cuda:<index>".
[[nodiscard]] std::string to_string(Device device);

// A stream as an integer: a cudaStream_t, or torch's `cuda_stream`. 0 is the device's default
// stream. The CPU backend runs every call to its end and ignores the stream.
using Stream = std::uintptr_t;

// What a launch needs to know about one seat. Written by Batch::publish, or by the caller of `ops`.
// A table of rows is int32 [num_rows, 8], columns in this order.
struct RowState {
  std::int32_t lease_id = -1;     // index into `last`; negative = nobody sits here
  std::int32_t base = 0;          // first slot of the lease
  std::int32_t cached_slots = 0;  // N; 0 = the lease is all window
  std::int32_t window_slots = 0;  // W
  std::int32_t length = 0;        // units that exist, with those that the open step writes
  std::int32_t committed = 0;     // units that exist without them
  std::int32_t window_begin = 0;  // first ordinal that the ring holds
  std::int32_t watermark = 0;     // units that are in host history
  friend bool operator==(const RowState&, const RowState&) = default;
};
static_assert(sizeof(RowState) == 8 * sizeof(std::int32_t));

// The step clock as launches see it. uint32 [2].
struct StepState {
  std::uint32_t clock = 0;  // + 1 per publish, wraps
  std::uint32_t open = 0;   // 1 between wait_ready and record_read / abort_step, else 0
};

// Bits of a row's error word. They are ORed; 0 means that nothing was wrong.
enum RowError : std::uint32_t {
  kErrorRange = 1u << 0,      // an ordinal outside [0, length)
  kErrorHole = 1u << 1,       // an ordinal in [watermark, window_begin): readable nowhere
  kErrorStale = 1u << 2,      // launched while no step is open, or twice in one step
  kErrorLease = 1u << 3,      // the row's state contradicts itself or the arena
  kErrorPage = 1u << 4,       // a miss whose page the page table does not have
  kErrorUncovered = 1u << 5,  // convert's check: a selected unit without a slot
};

// Bits of a launch's batch error word.
enum BatchError : std::uint32_t {
  kBatchErrorRow = 1u << 0,  // an entry of `rows` that is neither -1 nor a seated row
};

}  // namespace sparse_kvcm
