// What a block must know of its row, worked out by one thread and shared with the others.
#pragma once

#include <cstdint>

#include "core/row_state.hpp"
#include "cuda/device/seat.cuh"
#include "sparse_kvcm/entry.hpp"
#include "sparse_kvcm/ops.hpp"

namespace sparse_kvcm::device {

// A head says why its row resolves nothing.
inline constexpr std::uint32_t kNothing = 1u << 31;  // padding, or nobody seated

struct alignas(16) RowHead {
  std::int32_t base;
  std::int32_t cached_slots;
  std::int32_t cached_end;  // ordinals below it are in the cache or can be fetched into it
  std::uint32_t refusal;    // kNothing, bits of RowError, or 0
  std::int32_t window_begin;
  std::int32_t length;
  std::int32_t window_slots;
  std::int32_t committed;
  std::int32_t lease_id;
  std::uint32_t clock;
  std::uint32_t open;
  // Later than the rest: see RowResolver::run.
  std::int32_t window_first;  // window_begin mod window_slots
  std::uint32_t last;

  // The slot of an ordinal in [window_begin, length).
  [[nodiscard]] __device__ std::int32_t window_slot(std::int32_t ordinal) const {
    const std::int32_t at = window_first + (ordinal - window_begin);
    return base + cached_slots + (at < window_slots ? at : at - window_slots);
  }
};

// The state of the row at launch position `i`, a new RowState if there is none. Rows are mostly
// launched in their order: then this takes one trip to memory, not two, since it reads row `i`
// beside the row's number. Volatile, or the compiler waits for the number first.
__device__ inline RowState read_state(const ops::LaunchRows& launch, std::int64_t i,
                                      std::int32_t& row) {
  const auto num_rows = static_cast<std::uint32_t>(launch.num_rows);
  const auto exists = [&](std::int64_t r) { return static_cast<std::uint64_t>(r) < num_rows; };
  const auto read = [&](std::int64_t r) {
    RowState state;
    const auto* from = reinterpret_cast<const volatile std::int32_t*>(launch.row_states + r);
    state.lease_id = from[0];
    state.base = from[1];
    state.cached_slots = from[2];
    state.window_slots = from[3];
    state.length = from[4];
    state.committed = from[5];
    state.window_begin = from[6];
    state.watermark = from[7];
    return state;
  };
  const volatile std::int32_t* const rows = launch.rows;
  const RowState guess = exists(i) ? read(i) : RowState{};
  row = rows[i];
  if (row == i) return guess;
  return exists(row) ? read(row) : RowState{};
}

// The head of launch position `i`, but for what is not needed at once: see RowResolver::run.
__device__ inline RowHead read_head(const ops::ResolveParams& p, std::int64_t i) {
  RowHead head{};
  head.clock = p.step->clock;
  head.open = p.step->open;
  std::int32_t row = kPaddingRow;
  const RowState state = read_state(p.launch, i, row);
  if (state.lease_id < 0) {  // as a new RowState has it
    if (row != kPaddingRow) raise(p.errors.batch_error, kBatchErrorRow);
    head.refusal = kNothing;
    return head;
  }
  if (!row_is_consistent(state, p)) {
    head.refusal = kErrorLease;
    return head;
  }
  head.base = state.base;
  head.cached_slots = state.cached_slots;
  head.cached_end = min(state.watermark, state.window_begin);
  head.window_begin = state.window_begin;
  head.length = state.length;
  head.window_slots = state.window_slots;
  head.committed = state.committed;
  head.lease_id = state.lease_id;
  return head;
}

}  // namespace sparse_kvcm::device
