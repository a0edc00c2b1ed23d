// The stateless operations. The package's `ops` module documents them; here arguments are checked
// and passed on. They are thread-safe, so they run without the GIL.
#include "sparse_kvcm/ops.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <vector>

#include "args.hpp"
#include "array.hpp"
#include "bindings.hpp"
#include "group_memory.hpp"
#include "launch.hpp"
#include "record.hpp"
#include "sparse_kvcm/entry.hpp"

namespace sparse_kvcm::bindings {
namespace {

struct LaunchErrorArrays {
  Array row_errors, batch_error;
};

LaunchErrorArrays take_errors(ArrayChecker& checker, nb::handle row_errors,
                              nb::handle batch_error) {
  return {checker.take_optional(
              "row_errors", row_errors,
              {.elements = Elements::kWord, .shape = {"num_rows"}, .access = Access::kWrite}),
          checker.take_optional(
              "batch_error", batch_error,
              {.elements = Elements::kWord, .shape = {"1"}, .access = Access::kWrite})};
}

Array take_row_states(ArrayChecker& checker, nb::handle row_states) {
  return checker.take("row_states", row_states, {.shape = {"num_rows", "8"}});
}

ops::LaunchRows launch_rows(const ArrayChecker& checker, const Array& rows,
                            const Array& row_states) {
  return {rows.data<const std::int32_t>(), checker.extent32("b"), row_states.data<const RowState>(),
          checker.extent32("num_rows")};
}

void resolve(nb::handle selection, nb::handle rows, nb::handle row_states, nb::handle step,
             nb::handle entries, nb::handle last, nb::handle out, nb::handle no_write_slot,
             nb::handle row_errors, nb::handle batch_error, nb::handle stream) {
  constexpr const char* kFunction = "resolve";
  ArrayChecker checker(kFunction);
  const Array selection_array = take_selection(checker, selection);
  const Array rows_array = take_rows(checker, rows);
  const Array states = take_row_states(checker, row_states);
  const Array step_array =
      checker.take("step", step, {.elements = Elements::kWord, .shape = {"2"}});
  const Array entries_array =
      checker.take("entries", entries,
                   {.elements = Elements::kWord, .shape = {"num_slots"}, .access = Access::kWrite});
  const Array last_array = checker.take(
      "last", last,
      {.elements = Elements::kWord, .shape = {"num_leases"}, .access = Access::kWrite});
  const OutputArrays out_arrays = take_outputs(checker, out);
  const LaunchErrorArrays errors = take_errors(checker, row_errors, batch_error);

  const ops::ResolveParams params{
      .launch = launch_rows(checker, rows_array, states),
      .selection = selection_array.data<const std::int32_t>(),
      .selection_stride = selection_array.row_stride(),
      .k = checker.extent32("k"),
      .step = step_array.data<const StepState>(),
      .entries = entries_array.data<Entry>(),
      .num_slots = checker.extent("num_slots"),
      .last = last_array.data<std::uint32_t>(),
      .num_leases = checker.extent32("num_leases"),
      .max_new_units = checker.extent32("max_new_units"),
      .no_write_slot = to_int<std::int32_t>(kFunction, "no_write_slot", no_write_slot),
      .slots = out_arrays.slots.data<std::int32_t>(),
      .write_slots = out_arrays.write_slots.data<std::int32_t>(),
      .miss_ordinals = out_arrays.miss_ordinals.data<std::int32_t>(),
      .miss_slots = out_arrays.miss_slots.data<std::int32_t>(),
      .miss_counts = out_arrays.miss_counts.data<std::int32_t>(),
      .hit_counts = out_arrays.hit_counts.data<std::int32_t>(),
      .errors = {out_arrays.errors.data<std::uint32_t>(), errors.row_errors.data<std::uint32_t>(),
                 errors.batch_error.data<std::uint32_t>()}};
  const Stream stream_id = to_stream(kFunction, stream);
  const nb::gil_scoped_release release;
  ops::resolve(checker.device(), params, stream_id);
}

void fetch(nb::handle out, nb::handle rows, nb::handle row_states, nb::handle page_table,
           nb::handle memory, nb::handle row_errors, nb::handle batch_error, nb::handle stream) {
  constexpr const char* kFunction = "fetch";
  const auto& group = to_instance<GroupMemoryArrays>(kFunction, "memory", memory);
  ArrayChecker checker(kFunction, group.device());
  const Array rows_array = take_rows(checker, rows);
  const Array states = take_row_states(checker, row_states);
  const Array table = checker.take("page_table", page_table, {.shape = {"num_rows", "max_pages"}});
  const OutputArrays out_arrays = take_misses(checker, out);
  const LaunchErrorArrays errors = take_errors(checker, row_errors, batch_error);

  const ops::FetchParams params{
      .launch = launch_rows(checker, rows_array, states),
      .miss_ordinals = out_arrays.miss_ordinals.data<const std::int32_t>(),
      .miss_slots = out_arrays.miss_slots.data<const std::int32_t>(),
      .miss_counts = out_arrays.miss_counts.data<const std::int32_t>(),
      .k = checker.extent32("k"),
      .page_table = table.data<const std::int32_t>(),
      .max_pages = checker.extent("max_pages"),
      .memory = group.memory(),
      .errors = {out_arrays.errors.data<std::uint32_t>(), errors.row_errors.data<std::uint32_t>(),
                 errors.batch_error.data<std::uint32_t>()},
      .cursor = out_arrays.cursor.data<std::uint32_t>()};
  const Stream stream_id = to_stream(kFunction, stream);
  const nb::gil_scoped_release release;
  ops::fetch(checker.device(), params, stream_id);
}

// Keeps the objects: an iterator, or a list that changes during the call, does not.
struct Memories {
  std::vector<nb::object> objects;
  std::vector<const GroupMemoryArrays*> groups;
};

// One GroupMemory or several, all on one device.
Memories to_memories(const char* function, nb::handle memories) {
  if (nb::isinstance<GroupMemoryArrays>(memories)) {
    return {{nb::borrow(memories)},
            {&to_instance<GroupMemoryArrays>(function, "memories", memories)}};
  }
  Memories result{to_items(function, "memories", memories, "GroupMemory"), {}};
  auto& groups = result.groups;
  for (const nb::object& item : result.objects) {
    const std::string name = item_name("memories", groups.size());
    const auto& group = to_instance<GroupMemoryArrays>(function, name, item);
    if (!groups.empty() && group.device() != groups[0]->device()) {
      fail_argument(function, name, " must be on ", to_string(groups[0]->device()), ", got ",
                    to_string(group.device()));
    }
    groups.push_back(&group);
  }
  return result;
}

// Places that every one of `groups` has; said here in the words of the caller's arguments.
void check_moves(const char* function, const std::vector<ops::UnitMove>& moves,
                 const std::vector<const GroupMemoryArrays*>& groups) {
  const auto check = [&](const char* name, std::size_t i, std::int64_t value, std::int64_t limit) {
    if (value < 0 || value >= limit) {
      fail_argument(function, item_name(name, i), " must be in [0, ", limit, "), got ", value);
    }
  };
  for (const GroupMemoryArrays* group : groups) {
    for (std::size_t i = 0; i < moves.size(); ++i) {
      check("slots", i, moves[i].slot, group->num_slots());
      check("host_units", i, moves[i].host_unit, group->num_host_pages() * group->units_per_page());
    }
  }
}

void move_units(const char* function, ops::MoveDirection direction, nb::handle slots,
                nb::handle host_units, nb::handle memories, nb::handle stream) {
  const auto [objects, groups] = to_memories(function, memories);
  ArrayChecker checker(function);
  const Array slots_array = checker.take("slots", slots, {.shape = {"n"}, .place = Place::kHost});
  const Array units =
      checker.take("host_units", host_units,
                   {.elements = Elements::kInt64, .shape = {"n"}, .place = Place::kHost});
  std::vector<ops::UnitMove> moves(static_cast<std::size_t>(checker.extent("n")));
  for (std::size_t i = 0; i < moves.size(); ++i) {
    moves[i] = {units.data<const std::int64_t>()[i], slots_array.data<const std::int32_t>()[i]};
  }
  check_moves(function, moves, groups);

  const Stream stream_id = to_stream(function, stream);
  std::vector<ops::GroupMemory> memory;
  memory.reserve(groups.size());
  for (const GroupMemoryArrays* group : groups) memory.push_back(group->memory());
  const Device device = groups.empty() ? Device{} : groups[0]->device();
  const nb::gil_scoped_release release;
  ops::move_units(device, {.moves = moves, .groups = memory, .direction = direction}, stream_id);
}

void convert(nb::handle slots, nb::handle out, nb::handle units_per_page, nb::handle page_stride,
             nb::handle unit_stride, nb::handle first, nb::handle num_slots, nb::handle selection,
             nb::handle rows, nb::handle row_states, nb::handle errors, nb::handle stream) {
  constexpr const char* kFunction = "convert";
  ArrayChecker checker(kFunction);
  const Array slots_array = checker.take("slots", slots, {.shape = {"b", "k"}});
  const Array out_array = checker.take(
      "out", out,
      {.elements = Elements::kInt32OrInt64, .shape = {"b", "k"}, .access = Access::kWrite});
  const bool checks = !selection.is_none();
  if (!checks && !(rows.is_none() && row_states.is_none())) {
    fail_argument(kFunction, "selection must be given with rows and row_states, got None");
  }
  const ArraySpec words{.elements = Elements::kWord, .shape = {"b"}, .access = Access::kWrite};
  const Array errors_array = checks ? checker.take("errors", errors, words)
                                    : checker.take_optional("errors", errors, words);
  const bool is_64 = out_array.item_bytes() == 8;
  ops::ConvertParams params{
      .slots = slots_array.data<const std::int32_t>(),
      .b = checker.extent32("b"),
      .k = checker.extent32("k"),
      .units_per_page = to_int<std::int32_t>(kFunction, "units_per_page", units_per_page),
      .page_stride = to_int<std::int64_t>(kFunction, "page_stride", page_stride),
      .unit_stride = to_int<std::int64_t>(kFunction, "unit_stride", unit_stride),
      .first = to_int<std::int64_t>(kFunction, "first", first),
      .out32 = is_64 ? nullptr : out_array.data<std::int32_t>(),
      .out64 = is_64 ? out_array.data<std::int64_t>() : nullptr,
      .num_slots = to_int<std::int64_t>(kFunction, "num_slots", num_slots),
      .launch = {},
      .errors = {.errors = errors_array.data<std::uint32_t>()}};
  Array selection_array, rows_array, states;
  if (checks) {
    selection_array = take_selection(checker, selection);
    rows_array = take_rows(checker, rows);
    states = take_row_states(checker, row_states);
    params.selection = selection_array.data<const std::int32_t>();
    params.selection_stride = selection_array.row_stride();
    params.launch = launch_rows(checker, rows_array, states);
  }
  const Stream stream_id = to_stream(kFunction, stream);
  const nb::gil_scoped_release release;
  ops::convert(checker.device(), params, stream_id);
}

ops::LeaseReset to_reset(const char* function, const std::string& name, nb::handle value) {
  const auto items = to_items(function, name, value, "3 ints (lease_id, base, cached_slots)");
  if (items.size() != 3) {
    fail_argument(function, name, " must be (lease_id, base, cached_slots), got ", describe(value));
  }
  return {to_int<std::int32_t>(function, name + ".lease_id", items[0]),
          to_int<std::int32_t>(function, name + ".base", items[1]),
          to_int<std::int32_t>(function, name + ".cached_slots", items[2])};
}

// One array per group, all of the same extent.
std::vector<Array> take_per_group(ArrayChecker& checker, const char* name, nb::handle value,
                                  const char* extent) {
  std::vector<Array> arrays;
  for (const nb::object& item : to_items(checker.function(), name, value, "arrays")) {
    arrays.push_back(
        checker.take(item_name(name, arrays.size()), item,
                     {.elements = Elements::kWord, .shape = {extent}, .access = Access::kWrite}));
  }
  return arrays;
}

void reset_leases(nb::handle leases, nb::handle entries, nb::handle last, nb::handle clock,
                  nb::handle stream) {
  constexpr const char* kFunction = "reset_leases";
  std::vector<ops::LeaseReset> resets;
  for (const nb::object& item : to_items(kFunction, "leases", leases, "tuples")) {
    resets.push_back(to_reset(kFunction, item_name("leases", resets.size()), item));
  }
  ArrayChecker checker(kFunction);
  const auto entry_arrays = take_per_group(checker, "entries", entries, "num_slots");
  const auto last_arrays = take_per_group(checker, "last", last, "num_leases");
  std::vector<Entry*> entry_pointers;
  entry_pointers.reserve(entry_arrays.size());
  for (const Array& array : entry_arrays) entry_pointers.push_back(array.data<Entry>());
  std::vector<std::uint32_t*> last_pointers;
  last_pointers.reserve(last_arrays.size());
  for (const Array& array : last_arrays) last_pointers.push_back(array.data<std::uint32_t>());

  const ops::ResetParams params{.leases = resets,
                                .entries = entry_pointers,
                                .last = last_pointers,
                                .num_slots = checker.extent("num_slots"),
                                .num_leases = checker.extent32("num_leases"),
                                .clock = to_int<std::uint32_t>(kFunction, "clock", clock)};
  const Stream stream_id = to_stream(kFunction, stream);
  const nb::gil_scoped_release release;
  ops::reset_leases(checker.device(), params, stream_id);
}

std::vector<DecodedEntry> decode_entries(nb::handle entries) {
  ArrayChecker checker("decode_entries", Device{});
  const Array words =
      checker.take("entries", entries, {.elements = Elements::kWord, .shape = {"num_slots"}});
  const auto* const first = words.data<const Entry>();
  std::vector<DecodedEntry> decoded(static_cast<std::size_t>(checker.extent("num_slots")));
  std::transform(first, first + decoded.size(), decoded.begin(), decode_entry);
  return decoded;
}

}  // namespace

// Defaults and descriptions are in the `ops` module, whose functions call these.
void bind_ops(nb::module_& m) {
  using Handle = nb::handle;
  bind_group_memory(m);
  Record<DecodedEntry>(m, "DecodedEntry", "One entry of a cached slot, unpacked.")
      .field("empty", &DecodedEntry::empty, "True if the slot holds nothing.")
      .field("stamp", &DecodedEntry::stamp, "Clock mod 128 of the last use; 0 if empty.")
      .field("resident", &DecodedEntry::resident, "Already in the slot at its last use.")
      .field("ordinal", &DecodedEntry::ordinal, "The unit it holds; -1 if empty.")
      .done();
  m.def("resolve", &resolve, arg("selection"), arg("rows"), arg("row_states"), arg("step"),
        arg("entries"), arg("last"), arg("out"), arg("no_write_slot"), arg("row_errors"),
        arg("batch_error"), arg("stream"),
        nb::sig("def resolve(selection: sparse_kvcm._typing.Array, "
                "rows: sparse_kvcm._typing.Array, row_states: sparse_kvcm._typing.Array, "
                "step: sparse_kvcm._typing.Array, entries: sparse_kvcm._typing.Array, "
                "last: sparse_kvcm._typing.Array, out: sparse_kvcm.ops.ResolveOutputs, "
                "no_write_slot: int, row_errors: sparse_kvcm._typing.Array | None, "
                "batch_error: sparse_kvcm._typing.Array | None, stream: int) -> None"),
        "See sparse_kvcm.ops.resolve.");
  m.def("fetch", &fetch, arg("out"), arg("rows"), arg("row_states"), arg("page_table"),
        arg("memory"), arg("row_errors"), arg("batch_error"), arg("stream"),
        nb::sig("def fetch(out: sparse_kvcm.ops.ResolveOutputs, rows: sparse_kvcm._typing.Array, "
                "row_states: sparse_kvcm._typing.Array, page_table: sparse_kvcm._typing.Array, "
                "memory: GroupMemory, row_errors: sparse_kvcm._typing.Array | None, "
                "batch_error: sparse_kvcm._typing.Array | None, stream: int) -> None"),
        "See sparse_kvcm.ops.fetch.");
  m.def(
      "flush",
      [](Handle slots, Handle host_units, Handle memories, Handle stream) {
        move_units("flush", ops::MoveDirection::kArenaToHost, slots, host_units, memories, stream);
      },
      arg("slots"), arg("host_units"), arg("memories"), arg("stream"),
      nb::sig(
          "def flush(slots: sparse_kvcm._typing.Array, "
          "host_units: sparse_kvcm._typing.Array, "
          "memories: GroupMemory | collections.abc.Sequence[GroupMemory], stream: int) -> None"),
      "See sparse_kvcm.ops.flush.");
  m.def(
      "load",
      [](Handle slots, Handle host_units, Handle memories, Handle stream) {
        move_units("load", ops::MoveDirection::kHostToArena, slots, host_units, memories, stream);
      },
      arg("slots"), arg("host_units"), arg("memories"), arg("stream"),
      nb::sig(
          "def load(slots: sparse_kvcm._typing.Array, "
          "host_units: sparse_kvcm._typing.Array, "
          "memories: GroupMemory | collections.abc.Sequence[GroupMemory], stream: int) -> None"),
      "See sparse_kvcm.ops.load.");
  m.def("convert", &convert, arg("slots"), arg("out"), arg("units_per_page"), arg("page_stride"),
        arg("unit_stride"), arg("first"), arg("num_slots"), arg("selection"), arg("rows"),
        arg("row_states"), arg("errors"), arg("stream"),
        nb::sig("def convert(slots: sparse_kvcm._typing.Array, out: sparse_kvcm._typing.Array, "
                "units_per_page: int, page_stride: int, unit_stride: int, first: int, "
                "num_slots: int, selection: sparse_kvcm._typing.Array | None, "
                "rows: sparse_kvcm._typing.Array | None, "
                "row_states: sparse_kvcm._typing.Array | None, "
                "errors: sparse_kvcm._typing.Array | None, stream: int) -> None"),
        "See sparse_kvcm.ops.convert.");
  m.def("reset_leases", &reset_leases, arg("leases"), arg("entries"), arg("last"), arg("clock"),
        arg("stream"),
        nb::sig("def reset_leases(leases: collections.abc.Sequence[tuple[int, int, int]], "
                "entries: collections.abc.Sequence[sparse_kvcm._typing.Array], "
                "last: collections.abc.Sequence[sparse_kvcm._typing.Array], clock: int, "
                "stream: int) -> None"),
        "See sparse_kvcm.ops.reset_leases.");
  m.def("decode_entries", &decode_entries, arg("entries"),
        nb::sig("def decode_entries(entries: sparse_kvcm._typing.Array) -> list[DecodedEntry]"),
        R"(Unpack entries that lie in host memory.

Parameters
----------
entries : ndarray, uint32 or int32, shape (num_slots,)
    Packed words: stamp in bits 31-25, resident in bit 24, ordinal below.

Examples
--------
>>> import numpy as np
>>> from sparse_kvcm import ops
>>> ops.decode_entries(np.array([0xFFFFFFFF, (3 << 25) | (1 << 24) | 7], np.uint32))[1]
DecodedEntry(empty=False, stamp=3, resident=True, ordinal=7))");
}

}  // namespace sparse_kvcm::bindings
