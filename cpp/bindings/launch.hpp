// The arrays that launches of `ops` and of a Batch have in common.
#pragma once

#include <nanobind/nanobind.h>

#include "array.hpp"
#include "sparse_kvcm/batch.hpp"

namespace sparse_kvcm::bindings {

// Arrays of a Python `ResolveOutputs`, in the order of its fields.
struct OutputArrays {
  Array slots, write_slots, miss_ordinals, miss_slots, miss_counts, hit_counts, errors, cursor;
  [[nodiscard]] ResolveOutputs pointers() const;
};

// Selection [b, k], rows at any stride.
[[nodiscard]] Array take_selection(ArrayChecker& checker, nb::handle selection);
// Rows [b].
[[nodiscard]] Array take_rows(ArrayChecker& checker, nb::handle rows);

// All arrays of `out`, writable; "b", "k" and, if fixed, "max_new_units" must agree.
[[nodiscard]] OutputArrays take_outputs(ArrayChecker& checker, nb::handle out);
// Only those that fetch uses: misses, errors and the cursor, if there is one. Misses are read.
[[nodiscard]] OutputArrays take_misses(ArrayChecker& checker, nb::handle out);

}  // namespace sparse_kvcm::bindings
