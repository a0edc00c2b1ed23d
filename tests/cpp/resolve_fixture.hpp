// resolve as a function of plain values: ResolveInput -> ResolveResult, on any device.
#pragma once

#include <vector>

#include "ops_fixture.hpp"

namespace sparse_kvcm::testing {

struct ResolveInput {
  std::vector<std::int32_t> rows;
  std::vector<RowState> row_states;
  std::vector<std::int32_t> selection;  // [b, stride]
  std::int32_t k = 1;
  std::int32_t stride = 1;
  StepState step{1, 1};
  std::vector<Entry> entries;
  std::vector<std::uint32_t> last;
  std::int32_t max_new_units = 1;
  std::int32_t no_write_slot = kNoSlot;
  std::int32_t max_units = kMaxUnits;

  [[nodiscard]] std::size_t b() const { return rows.size(); }
  [[nodiscard]] std::int32_t selected(std::size_t i, std::int32_t j) const {
    return selection[i * static_cast<std::size_t>(stride) + static_cast<std::size_t>(j)];
  }
};

// Everything that resolve may write. Outputs that it overwrites begin as poison, those that it ORs
// with a bit that it never sets.
struct ResolveResult {
  std::vector<std::int32_t> slots, write_slots, miss_ordinals, miss_slots, miss_counts, hit_counts;
  std::vector<std::uint32_t> errors, row_errors, batch_error;
  std::vector<Entry> entries;
  std::vector<std::uint32_t> last;

  explicit ResolveResult(const ResolveInput& input)
      : slots(input.b() * static_cast<std::size_t>(input.k), kPoison),
        write_slots(input.b() * static_cast<std::size_t>(input.max_new_units), kPoison),
        miss_ordinals(slots),
        miss_slots(slots),
        miss_counts(input.b(), kPoison),
        hit_counts(input.b(), kPoison),
        errors(input.b(), kPoisonWord),
        row_errors(input.row_states.size(), kErrorPage),
        batch_error(1, 1u << 7),
        entries(input.entries),
        last(input.last) {}
};

// `threads` as in ops::ResolveParams.
inline ResolveResult resolve_on(Device device, const ResolveInput& input,
                                std::int32_t threads = 0) {
  ResolveResult result(input);
  const DeviceArray rows(device, input.rows);
  const DeviceArray row_states(device, input.row_states);
  const DeviceArray selection(device, input.selection);
  const DeviceArray step(device, std::vector<StepState>{input.step});
  const DeviceArray entries(device, input.entries), last(device, input.last);
  const DeviceArray slots(device, result.slots), write_slots(device, result.write_slots);
  const DeviceArray miss_ordinals(device, result.miss_ordinals);
  const DeviceArray miss_slots(device, result.miss_slots);
  const DeviceArray miss_counts(device, result.miss_counts), hit_counts(device, result.hit_counts);
  const DeviceArray errors(device, result.errors), row_errors(device, result.row_errors);
  const DeviceArray batch_error(device, result.batch_error);

  ops::ResolveParams params;
  params.launch = {rows.data(), static_cast<std::int32_t>(input.b()), row_states.data(),
                   static_cast<std::int32_t>(input.row_states.size())};
  params.selection = selection.data();
  params.selection_stride = input.stride;
  params.k = input.k;
  params.step = step.data();
  params.entries = entries.data();
  params.num_slots = static_cast<std::int64_t>(input.entries.size());
  params.last = last.data();
  params.num_leases = static_cast<std::int32_t>(input.last.size());
  params.max_new_units = input.max_new_units;
  params.no_write_slot = input.no_write_slot;
  params.max_units = input.max_units;
  params.threads = threads;
  params.slots = slots.data();
  params.write_slots = write_slots.data();
  params.miss_ordinals = miss_ordinals.data();
  params.miss_slots = miss_slots.data();
  params.miss_counts = miss_counts.data();
  params.hit_counts = hit_counts.data();
  params.errors = {errors.data(), row_errors.data(), batch_error.data()};
  ops::resolve(device, params, 0);

  result.slots = slots.download();
  result.write_slots = write_slots.download();
  result.miss_ordinals = miss_ordinals.download();
  result.miss_slots = miss_slots.download();
  result.miss_counts = miss_counts.download();
  result.hit_counts = hit_counts.download();
  result.errors = errors.download();
  result.row_errors = row_errors.download();
  result.batch_error = batch_error.download();
  result.entries = entries.download();
  result.last = last.download();
  return result;
}

// Compares every cell, also those that the call has to leave alone. Cells of the miss lists past
// their count are the call's to leave or overwrite.
inline void expect_same(ResolveResult actual, const ResolveResult& expected) {
  expect_equal("errors", actual.errors, expected.errors);
  expect_equal("slots", actual.slots, expected.slots);
  expect_equal("write_slots", actual.write_slots, expected.write_slots);
  expect_equal("miss_counts", actual.miss_counts, expected.miss_counts);
  expect_equal("hit_counts", actual.hit_counts, expected.hit_counts);
  const std::size_t k = actual.slots.size() / std::max<std::size_t>(actual.errors.size(), 1);
  for (std::size_t cell = 0; cell < actual.slots.size(); ++cell) {
    if (static_cast<std::int32_t>(cell % k) < expected.miss_counts[cell / k]) continue;
    actual.miss_ordinals[cell] = expected.miss_ordinals[cell];
    actual.miss_slots[cell] = expected.miss_slots[cell];
  }
  expect_equal("miss_ordinals", actual.miss_ordinals, expected.miss_ordinals);
  expect_equal("miss_slots", actual.miss_slots, expected.miss_slots);
  expect_equal("row_errors", actual.row_errors, expected.row_errors);
  expect_equal("batch_error", actual.batch_error, expected.batch_error);
  expect_equal("entries", actual.entries, expected.entries);
  expect_equal("last", actual.last, expected.last);
}

}  // namespace sparse_kvcm::testing
