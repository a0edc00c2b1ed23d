// Batch: seats and steps.
#include "sparse_kvcm/batch.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <vector>

#include "args.hpp"
#include "array.hpp"
#include "bindings.hpp"
#include "gil.hpp"
#include "launch.hpp"
#include "manager/batch_state.hpp"
#include "record.hpp"

namespace sparse_kvcm::bindings {
namespace {

const KvCacheManagerConfig& config_of(const Batch& batch) {
  return batch.state()->manager()->config;
}

std::int32_t add(Batch& batch, nb::handle cache, nb::handle row) {
  constexpr const char* kFunction = "Batch.add";
  auto& request = to_instance<KvCache>(kFunction, "cache", cache);
  if (row.is_none()) return without_gil([&] { return batch.add(request); });
  const auto wanted = to_int<std::int32_t>(kFunction, "row", row);
  return without_gil([&] { return batch.add(request, wanted); });
}

// A mapping from rows to numbers, as a list of `Row`.
template <class Row>
std::vector<Row> to_rows(const char* function, const char* name, nb::handle value) {
  std::vector<Row> rows;
  for (const IntItem& item : to_int_items(function, name, value)) {
    rows.push_back(
        {item.key, to_int<std::int32_t>(function, item_name(name, item.key), item.value)});
  }
  return rows;
}

template <class Row>
nb::dict by_row(const std::vector<Row>& rows, const std::vector<ResizeResult>& results) {
  nb::dict dict;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    dict[nb::int_(rows[i].row)] = nb::cast(results[i]);
  }
  return dict;
}

nb::dict resize(Batch& batch, nb::handle lengths) {
  const auto wanted = to_rows<RowLength>("Batch.resize", "lengths", lengths);
  return by_row(wanted, without_gil([&] { return batch.resize(wanted); }));
}

nb::dict resize_tokens(Batch& batch, nb::handle capacities, nb::handle stream) {
  constexpr const char* kFunction = "Batch.resize_tokens";
  const auto wanted = to_rows<RowTokens>(kFunction, "capacities", capacities);
  const Stream on = to_stream(kFunction, stream);
  return by_row(wanted, without_gil([&] { return batch.resize_tokens(wanted, on); }));
}

BatchMemoryUse planned(nb::handle config, nb::handle max_rows, nb::handle max_units) {
  constexpr const char* kFunction = "planned_batch_memory";
  return planned_batch_memory(to_instance<KvCacheManagerConfig>(kFunction, "config", config),
                              {.max_rows = to_int<std::int32_t>(kFunction, "max_rows", max_rows),
                               .max_units = static_cast<std::int32_t>(
                                   to_int64(kFunction, "max_units", max_units, 1, kMaxUnits))});
}

// The Batch's own arrays of a group, as far as a launch of [b, k] wrote them.
nb::object own_outputs(const Batch& batch, std::int32_t group, std::int64_t b, std::int64_t k) {
  const KvCacheManagerConfig& config = config_of(batch);
  const ResolveOutputs own = batch.outputs(group);
  const auto array = [&](auto* data, const std::vector<std::int64_t>& shape) {
    return to_python(config.device, data, shape, batch.state());
  };
  return nb::module_::import_("sparse_kvcm.ops")
      .attr("ResolveOutputs")(array(own.slots, {b, k}),
                              array(own.write_slots, {b, config.max_new_units}),
                              array(own.miss_ordinals, {b, k}), array(own.miss_slots, {b, k}),
                              array(own.miss_counts, {b}), array(own.hit_counts, {b}),
                              array(own.errors, {b}), array(own.cursor, {2}));
}

nb::object resolve(Batch& batch, nb::handle group, nb::handle rows, nb::handle selection,
                   nb::handle out, nb::handle stream) {
  constexpr const char* kFunction = "Batch.resolve";
  const auto group_id = to_int<std::int32_t>(kFunction, "group", group);
  ArrayChecker checker(kFunction, config_of(batch).device);
  checker.fix("max_new_units", config_of(batch).max_new_units, "the config");
  const Array rows_array = take_rows(checker, rows);
  const Array selection_array = take_selection(checker, selection);
  const OutputArrays out_arrays = out.is_none() ? OutputArrays() : take_outputs(checker, out);
  const std::int32_t b = checker.extent32("b");
  const std::int32_t k = checker.extent32("k");
  const Stream on = to_stream(kFunction, stream);
  without_gil([&] {
    batch.resolve(group_id, rows_array.data<const std::int32_t>(), b,
                  selection_array.data<const std::int32_t>(), k, selection_array.row_stride(),
                  out_arrays.pointers(), on);
  });
  return out.is_none() ? own_outputs(batch, group_id, b, k) : nb::borrow(out);
}

void fetch(Batch& batch, nb::handle group, nb::handle rows, nb::handle out, nb::handle stream,
           nb::handle layers) {
  constexpr const char* kFunction = "Batch.fetch";
  const auto group_id = to_int<std::int32_t>(kFunction, "group", group);
  ArrayChecker checker(kFunction, config_of(batch).device);
  const Array rows_array = take_rows(checker, rows);
  const OutputArrays out_arrays = take_misses(checker, out);
  const std::int32_t b = checker.extent32("b");
  const std::int32_t k = checker.extent32("k");
  const Stream on = to_stream(kFunction, stream);
  std::vector<std::int32_t> named;
  if (!layers.is_none()) {
    named = to_int32s(kFunction, "layers", layers);
    if (named.empty()) fail_argument(kFunction, "layers must name a layer; None means all");
  }
  without_gil([&] {
    batch.fetch(group_id, rows_array.data<const std::int32_t>(), b, k, named, out_arrays.pointers(),
                on);
  });
}

nb::object row_states(const Batch& batch) {
  return to_python(config_of(batch).device,
                   reinterpret_cast<const std::int32_t*>(batch.row_states_address()),
                   {batch.max_rows(), 8}, batch.state());
}

nb::object page_table(const Batch& batch) {
  return to_python(config_of(batch).device, batch.page_table_address(),
                   {batch.max_rows(), batch.max_pages()}, batch.state());
}

nb::object page_tables(const Batch& batch) {
  return to_python(config_of(batch).device, batch.page_table_address(0),
                   {batch.num_layer_groups(), batch.max_rows(), batch.max_pages()}, batch.state());
}

nb::object page_counts(const Batch& batch) {
  return to_python(config_of(batch).device, batch.page_counts_address(0),
                   {batch.num_layer_groups(), batch.max_rows()}, batch.state());
}

// A method that takes a stream alone.
template <class Method>
auto on_stream(const char* function, Method method) {
  return [function, method](Batch& self, nb::handle stream) {
    const Stream on = to_stream(function, stream);
    return without_gil([&] { return (self.*method)(on); });
  };
}

void bind_records(nb::module_& m) {
  nb::enum_<ResizeResult>(m, "ResizeResult", "What became of a row's wish for a length.")
      .value("OK", ResizeResult::kOk, "it has it")
      .value("PAST_NEED", ResizeResult::kPastNeed, "past the need declared at creation")
      .value("PAST_WINDOW", ResizeResult::kPastWindow,
             "past the window above the watermark that the next publish reaches: host history is "
             "full")
      .value("PAST_NEW_UNITS", ResizeResult::kPastNewUnits, "more than max_new_units in one step")
      .value("OUT_OF_PAGES", ResizeResult::kOutOfPages,
             "a pool group of dense layers has too few free pages");
  Record<StepError>(m, "StepError", "What a closed step reported of one row in one group.")
      .field("row", &StepError::row, "Its seat.")
      .field("group", &StepError::group, "The selection group.")
      .field(
          "bits", [](const StepError& self) { return static_cast<RowError>(self.bits); },
          "What was wrong.")
      .field("clock", &StepError::clock, "Of the step in whose report it came.")
      .done();
  Record<StepErrors>(m, "StepErrors", "What closed steps reported.")
      .field("rows", &StepErrors::rows, "Errors of rows, oldest first.")
      .field(
          "batch", [](const StepErrors& self) { return static_cast<BatchError>(self.batch); },
          "Errors of launches, ORed.")
      .done();
}

constexpr const char* kClassDoc =
    R"(Seats requests in rows and takes them through decode steps together.

Made by `KvCacheManager.create_batch`. Between steps `add`, `remove` and `resize`; then `publish`,
`wait_ready`, per selection group `resolve` and `fetch`, and at last `record_read`, or `abort_step`
after a failed forward. Rows are stable and never compacted. It does not own its requests.
Many threads may work on one manager, but one at a time on a Batch and the requests in it.)";

constexpr const char* kResolveDoc =
    R"(Map each selected unit of one group to its final arena slot.

Parameters
----------
group : int
    Selection group.
rows : ndarray, int32, shape (b,), on the manager's device
    Seats in launch order; -1 is graph padding. ``b <= max_rows``.
selection : ndarray, int32, shape (b, k), on the manager's device
    Ordinals, -1 anywhere for none; ``k <= top_k``. Rows at any stride.
out : ResolveOutputs, optional
    Arrays to write; without it the Batch's own set of the group, which the next resolve of the
    group overwrites.
stream : int
    Where the work is ordered.

Returns
-------
ResolveOutputs
    `out`, or views of the Batch's own arrays.

Raises
------
InvalidArgument
    If an array or the group does not fit. What only the device sees goes to ``errors``.)";

constexpr const char* kPublishDoc =
    R"(Flush committed units, raise watermarks, upload what changed, and open a step.

Returns
-------
list of int
    Rows uploaded, ascending.

Raises
------
InvalidState
    If a step is open, the stream is being captured or the Batch is closed.)";

void bind_memory_use(nb::module_& m) {
  Record<BatchMemoryUse>(m, "BatchMemoryUse", "Bytes that a Batch holds.")
      .field("device_bytes", &BatchMemoryUse::device_bytes,
             "Device: seats, page table, error words, resolve's outputs of all groups.")
      .field("staging_bytes", &BatchMemoryUse::staging_bytes,
             "Pinned host memory that steps take as they need it; not measured.")
      .done();
  m.def("planned_batch_memory", &planned, arg("config"), arg("max_rows"), arg("max_units"),
        nb::sig("def planned_batch_memory(config: KvCacheManagerConfig, max_rows: int, "
                "max_units: int) -> BatchMemoryUse"),
        "What `memory_use` of a Batch of a manager of `config` will say; takes no memory.");
}

}  // namespace

void bind_batch(nb::module_& m) {
  bind_records(m);
  bind_memory_use(m);
  nb::class_<Batch>(m, "Batch", kClassDoc)
      .def("add", &add, arg("cache"), arg("row") = nb::none(),
           nb::sig("def add(self, cache: KvCache, row: int | None = None) -> int"),
           "Seat an ACTIVE request, in `row` or in the first free row, and return the row.\n\n"
           "Raises InvalidArgument for a row outside [0, max_rows) or an occupied one, or a need "
           "above max_units; InvalidState if the request is not ACTIVE, belongs elsewhere, or no "
           "row is free.")
      .def(
          "remove",
          [](Batch& self, nb::handle cache) {
            auto& request = to_instance<KvCache>("Batch.remove", "cache", cache);
            without_gil([&] { self.remove(request); });
          },
          arg("cache"), nb::sig("def remove(self, cache: KvCache) -> None"),
          "Take the request out of its row; it keeps its lease.")
      .def("close", &Batch::close, nb::call_guard<nb::gil_scoped_release>(),
           "Detach every request without closing it; abort an open step.")
      .def("resize", &resize, arg("lengths"),
           nb::sig("def resize(self, lengths: collections.abc.Mapping[int, int]) -> "
                   "dict[int, ResizeResult]"),
           "Set the length, in units, that the next step will have, per row.\n\n"
           "A row that cannot have it keeps its length and says why. Raises InvalidState during an "
           "open step, InvalidArgument for a row that is unseated or a length below the committed "
           "one.")
      .def("resize_tokens", &resize_tokens, arg("capacities"), arg("stream") = 0,
           nb::sig("def resize_tokens(self, capacities: collections.abc.Mapping[int, int], "
                   "stream: int = 0) -> dict[int, ResizeResult]"),
           "The same in tokens, with pages of dense layers, which come in the order of `stream`.")
      .def("publish", on_stream("Batch.publish", &Batch::publish), arg("stream") = 0,
           nb::sig("def publish(self, stream: int = 0) -> list[int]"), kPublishDoc)
      .def("wait_ready", on_stream("Batch.wait_ready", &Batch::wait_ready), arg("stream") = 0,
           nb::sig("def wait_ready(self, stream: int = 0) -> None"),
           "Let `stream` wait for the last publish; the step opens on the device in its order.")
      .def("resolve", &resolve, arg("group"), arg("rows"), arg("selection"),
           arg("out") = nb::none(), arg("stream") = 0,
           nb::sig("def resolve(self, group: int, rows: sparse_kvcm._typing.Array, "
                   "selection: sparse_kvcm._typing.Array, "
                   "out: sparse_kvcm.ops.ResolveOutputs | None = None, stream: int = 0) -> "
                   "sparse_kvcm.ops.ResolveOutputs"),
           kResolveDoc)
      .def("fetch", &fetch, arg("group"), arg("rows"), arg("out"), arg("stream") = 0,
           arg("layers") = nb::none(),
           nb::sig("def fetch(self, group: int, rows: sparse_kvcm._typing.Array, "
                   "out: sparse_kvcm.ops.ResolveOutputs, stream: int = 0, "
                   "layers: collections.abc.Sequence[int] | None = None) -> None"),
           "Copy the misses of the group's last resolve, same `rows` and `out`, from host history "
           "into their slots, for all member layers or for `layers`.\n\n"
           "So one fetches the leader's units, and its followers' on another stream while the "
           "leader computes; each of them before record_read. Launches of one group that may run "
           "at a time need `out` with a cursor of its own.\n\n"
           "Raises ValueError for a layer that is not the group's or is named twice.")
      .def(
          "record_read",
          [](Batch& self, nb::handle rows, nb::handle stream) {
            constexpr const char* kFunction = "Batch.record_read";
            const std::vector<std::int32_t> committed = to_int32s(kFunction, "rows", rows);
            const Stream on = to_stream(kFunction, stream);
            without_gil([&] { self.record_read(committed, on); });
          },
          arg("rows"), arg("stream") = 0,
          nb::sig("def record_read(self, rows: collections.abc.Sequence[int], stream: int = 0) "
                  "-> None"),
          "Close the step and commit the growth of `rows`; others get their lengths back.\n\n"
          "Raises InvalidState without an open step, InvalidArgument for a row that was not seated "
          "at publish or is named twice.")
      .def("abort_step", on_stream("Batch.abort_step", &Batch::abort_step), arg("stream") = 0,
           nb::sig("def abort_step(self, stream: int = 0) -> None"),
           "Close the step after a failed forward: lengths go back, entries are emptied.")
      .def("memory_use", &Batch::memory_use, nb::call_guard<nb::gil_scoped_release>(),
           "Bytes held.")
      .def("take_errors", &Batch::take_errors, nb::call_guard<nb::gil_scoped_release>(),
           "Errors that closed steps reported since the last call.")
      .def_prop_ro("max_rows", &Batch::max_rows, "Seats.")
      .def_prop_ro("clock", &Batch::clock, nb::for_getter(nb::call_guard<nb::gil_scoped_release>()),
                   "Publishes so far, mod 2**32.")
      .def_prop_ro("step_open", &Batch::step_open,
                   nb::for_getter(nb::call_guard<nb::gil_scoped_release>()),
                   "Between publish and record_read or abort_step.")
      .def_prop_ro("dirty_rows", &Batch::dirty_rows,
                   nb::for_getter(nb::call_guard<nb::gil_scoped_release>()),
                   "Rows that the next publish uploads.")
      .def_prop_ro("table_rows", &Batch::table_rows,
                   nb::for_getter(nb::call_guard<nb::gil_scoped_release>()),
                   "Rows of which the last publish wrote page tables, ascending.")
      .def_prop_ro("max_pages", &Batch::max_pages, "Columns of `page_table`.")
      .def_prop_ro("row_states", &row_states, nb::sig("def row_states(self, /) -> typing.Any"),
                   "Device memory, int32 (max_rows, 8): lease_id, base, cached_slots, "
                   "window_slots, length, committed, window_begin, watermark. Read-only.")
      .def_prop_ro("page_table", &page_table, nb::sig("def page_table(self, /) -> typing.Any"),
                   "Device memory, int32 (max_rows, max_pages): host page ids, -1 for none. "
                   "Read-only. Raises InvalidState in a manager without groups.")
      .def_prop_ro("num_layer_groups", &Batch::num_layer_groups, "First axis of `page_tables`.")
      .def_prop_ro("page_tables", &page_tables, nb::sig("def page_tables(self, /) -> typing.Any"),
                   "Device memory, int32 (num_layer_groups, max_rows, max_pages): slots of dense "
                   "layer groups, host page ids of the sparse one, -1 for none. Read-only.")
      .def_prop_ro("page_counts", &page_counts, nb::sig("def page_counts(self, /) -> typing.Any"),
                   "Device memory, int32 (num_layer_groups, max_rows): entries of each table. "
                   "Read-only.");
}

}  // namespace sparse_kvcm::bindings
