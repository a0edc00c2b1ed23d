// KvCache: one request.
#include "sparse_kvcm/kv_cache.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "args.hpp"
#include "array.hpp"
#include "bindings.hpp"
#include "gil.hpp"
#include "int32_array.hpp"
#include "manager/request.hpp"
#include "record.hpp"

namespace sparse_kvcm::bindings {
namespace {

// The rows of one member layer: [n, ...] of any dtype, a row being one unit's bytes.
UnitRows take_unit_rows(ArrayChecker& checker, const std::string& name, nb::handle value,
                        std::int64_t unit_bytes, std::vector<Array>& keep) {
  keep.push_back(checker.take(name, value,
                              {.elements = Elements::kAny,
                               .shape = {"n", "..."},
                               .strides = Strides::kRows,
                               .place = Place::kHost}));
  const Array& array = keep.back();
  if (array.row_bytes() != unit_bytes) {
    fail_argument(checker.function(), name, " must have rows of ", unit_bytes,
                  " bytes, one unit of the layer's layout, got ", array.row_bytes());
  }
  return {array.data<const std::byte>(), array.row_stride() * array.item_bytes()};
}

void import_history(KvCache& cache, nb::handle layers, nb::handle stream) {
  constexpr const char* kFunction = "KvCache.import_history";
  const ManagerState& manager = *cache.request()->manager();
  std::vector<IntItem> given = to_int_items(kFunction, "layers", layers);
  for (const IntItem& item : given) {
    if (std::ranges::find(manager.layers, item.key) == manager.layers.end()) {
      fail_argument(kFunction, "keys of layers must be member layers of the config, got ",
                    item.key);
    }
  }
  ArrayChecker checker(kFunction);
  std::vector<Array> keep;
  std::vector<UnitRows> rows;
  for (std::size_t i = 0; i < manager.layers.size(); ++i) {
    const auto found = std::ranges::find(given, manager.layers[i], &IntItem::key);
    if (found == given.end()) {
      fail_argument(kFunction, "layers must have all ", manager.layers.size(),
                    " member layers, got none for layer ", manager.layers[i]);
    }
    const auto group = static_cast<std::size_t>(manager.layer_groups[i]);
    const std::int64_t unit_bytes = manager.config.groups[group].layout.unit_bytes();
    rows.push_back(
        take_unit_rows(checker, item_name("layers", found->key), found->value, unit_bytes, keep));
  }
  const std::int32_t num_units = checker.extent32("n");
  const Stream on = to_stream(kFunction, stream);
  without_gil([&] { cache.import_history(rows, num_units, on); });
}

// Slots with a page of each region of each member layer, at these offsets.
std::vector<RegionPages> take_regions(ArrayChecker& checker, const KvCache& cache,
                                      std::int32_t group, nb::handle slots, nb::handle offsets,
                                      std::int32_t units_per_page, Array& keep) {
  const ManagerState& manager = *cache.request()->manager();
  manager.check_group(checker.function(), group);
  const std::vector<std::int32_t>& bytes =
      manager.config.groups[static_cast<std::size_t>(group)].layout.region_bytes();
  keep = checker.take("slots", slots,
                      {.elements = Elements::kByte,
                       .shape = {"n", "slot_bytes"},
                       .strides = Strides::kRows,
                       .place = Place::kHost});
  std::vector<RegionPages> regions;
  for (const nb::object& item : to_items(checker.function(), "offsets", offsets, "ints")) {
    const std::int64_t page = std::int64_t{units_per_page} * bytes[regions.size() % bytes.size()];
    const std::string name = item_name("offsets", regions.size());
    const std::int64_t most = keep.extent(1) - page;
    const auto offset = to_int<std::int64_t>(checker.function(), name, item);
    if (offset < 0 || offset > most) {
      fail_argument(checker.function(), name, " must be in [0, ", most, "], so that a page of ",
                    page, " bytes lies in a slot of ", keep.extent(1), ", got ", offset);
    }
    regions.push_back({keep.data<const std::byte>() + offset, keep.row_stride()});
  }
  return regions;
}

void write_history(KvCache& self, nb::handle group, nb::handle first, nb::handle num_units,
                   nb::handle slots, nb::handle offsets, nb::handle units_per_page) {
  constexpr const char* kFunction = "KvCache.write_history";
  const auto id = to_int<std::int32_t>(kFunction, "group", group);
  HistoryPages pages;
  pages.first = to_int<std::int32_t>(kFunction, "first", first);
  pages.num_units = to_int<std::int32_t>(kFunction, "num_units", num_units);
  pages.units_per_page = to_int<std::int32_t>(kFunction, "units_per_page", units_per_page);
  ArrayChecker checker(kFunction);
  Array keep;
  const std::vector<RegionPages> regions =
      take_regions(checker, self, id, slots, offsets, pages.units_per_page, keep);
  // A page of no units is the callee's to refuse.
  if (pages.units_per_page > 0 && pages.num_units > keep.extent(0) * pages.units_per_page) {
    fail_argument(kFunction, "num_units must be at most ", keep.extent(0), " slots x ",
                  pages.units_per_page, " units, got ", pages.num_units);
  }
  pages.regions = regions;
  without_gil([&] { self.write_history(id, pages); });
}

bool resize(KvCache& self, nb::handle capacity, nb::handle history_length, nb::handle stream) {
  constexpr const char* kFunction = "KvCache.resize";
  const auto room = to_int<std::int32_t>(kFunction, "capacity", capacity);
  const auto computed = to_int<std::int32_t>(kFunction, "history_length", history_length);
  const Stream on = to_stream(kFunction, stream);
  return without_gil([&] { return self.resize(room, computed, on); });
}

// The array lives as long as the request may write it. Its end needs the GIL, whoever brings it.
void set_index_buffer(KvCache& self, nb::handle layer_group, nb::handle buffer) {
  constexpr const char* kFunction = "KvCache.set_base_page_index_buf";
  const auto group = to_int<std::int32_t>(kFunction, "layer_group", layer_group);
  std::span<std::int32_t> memory;
  std::shared_ptr<const void> owner;
  if (!buffer.is_none()) {
    ArrayChecker checker(kFunction);
    auto* array = new Array(checker.take(
        "buffer", buffer, {.shape = {"n"}, .access = Access::kWrite, .place = Place::kHost}));
    owner = std::shared_ptr<const Array>(array, [](const Array* held) {
      const nb::gil_scoped_acquire gil;
      delete held;
    });
    memory = {array->data<std::int32_t>(), static_cast<std::size_t>(array->extent(0))};
  }
  without_gil([&] { self.set_base_page_index_buf(group, memory, owner); });
}

void bind_records(nb::module_& m) {
  nb::enum_<KvCacheState>(m, "KvCacheState", "What a request has.")
      .value("SUSPENDED", KvCacheState::kSuspended, "no lease; its history is on the host")
      .value("ACTIVE", KvCacheState::kActive, "a lease")
      .value("CLOSED", KvCacheState::kClosed, "nothing");
  Record<Lease>(m, "Lease", "A request's part of the arena.")
      .field("id", &Lease::id, "Which lease.")
      .field("base", &Lease::base, "First slot.")
      .field("cached_slots", &Lease::cached_slots, "N; 0 if the lease is all window.")
      .field("window_slots", &Lease::window_slots, "W.")
      .field("generation", &Lease::generation, "Never used twice in a manager's life.")
      .done();
}

constexpr const char* kClassDoc =
    R"(One request: its history on the host, its lease in the arena and its lengths.

Made by `KvCacheManager.create_kv_cache`; SUSPENDED at first. All counts are units. While ACTIVE
``0 <= window_begin <= watermark <= committed_length <= length <= need``. Garbage collection closes
it, also while it sits in a Batch: keep a reference as long as the request lives. One thread at a
time on a request, many on one manager.

With dense layers it has pages for `capacity` tokens, `history_length` of which are computed.)";

constexpr const char* kImportDoc =
    R"(Append units to host history: a prompt, or a received transfer. All of it or nothing.

Parameters
----------
layers : mapping of int to ndarray, any dtype, shape (n, ...), host memory
    By layer id, for all member layers and with equal n. A row is one unit, its regions one after
    the other: its bytes are the ``unit_bytes`` of the layer's layout. Rows at any stride.
stream : int
    Where work on an all-window lease is ordered. The arrays may be reused after the call.

Raises
------
InvalidArgument
    If a layer or an array does not fit, or units would pass ``need``.
OutOfPages
    If host history is full.
InvalidState
    If CLOSED, in an open step, with growth pending or the watermark below the committed length.)";

constexpr const char* kWriteDoc =
    R"(Repack received pages of one selection group into host history, on this thread.

In any order, each unit once; several threads may do it for one request. Without the GIL. Before
`commit_history` nobody can read it.

Parameters
----------
group : int
first, num_units : int
    Ordinals [first, first + num_units); the first slot begins with `first`.
slots : ndarray, uint8, shape (n, slot_bytes), host memory
    Page by page, what a pool's slots hold; rows at any stride.
offsets : sequence of int
    Of the pages in a slot, in bytes: for each member layer, leader first, one for each region.
units_per_page : int
    Of these pages, whatever host history's are.

Raises
------
InvalidArgument
    For a bad group, an array or offset that does not fit, or units that are not reserved or have
    been written.
InvalidState
    If CLOSED or not receiving.)";

void bind_receiving(nb::class_<KvCache>& cache) {
  cache
      .def(
          "reserve_history",
          [](KvCache& self, nb::handle num_units) {
            const auto units =
                to_int<std::int32_t>("KvCache.reserve_history", "num_units", num_units);
            return without_gil([&] { return self.reserve_history(units); });
          },
          arg("num_units"), nb::sig("def reserve_history(self, num_units: int) -> bool"),
          "Take host pages for so many units more: from here on the request is receiving. False, "
          "and nothing changed, if there are too few.\n\n"
          "Until `commit_history` it is in no Batch and every other change but `close` is refused. "
          "Raises InvalidArgument for units past `need`, InvalidState as `import_history`.")
      .def("write_history", &write_history, arg("group"), arg("first"), arg("num_units"),
           arg("slots"), arg("offsets"), arg("units_per_page"),
           nb::sig("def write_history(self, group: int, first: int, num_units: int, "
                   "slots: sparse_kvcm._typing.Array, offsets: collections.abc.Sequence[int], "
                   "units_per_page: int) -> None"),
           kWriteDoc)
      .def(
          "commit_history",
          [](KvCache& self, nb::handle stream) {
            const Stream on = to_stream("KvCache.commit_history", stream);
            without_gil([&] { self.commit_history(on); });
          },
          arg("stream") = 0, nb::sig("def commit_history(self, stream: int = 0) -> None"),
          "Move the watermark behind all reserved units; the newest are loaded into the window of "
          "the lease, if there is one.\n\n"
          "Raises InvalidState unless each unit of each group has been written.")
      .def_prop_ro("is_receiving", &KvCache::is_receiving,
                   nb::for_getter(nb::call_guard<nb::gil_scoped_release>()),
                   "Between `reserve_history` and `commit_history`.");
}

}  // namespace

void bind_kv_cache(nb::module_& m) {
  bind_records(m);
  const auto no_gil = nb::for_getter(nb::call_guard<nb::gil_scoped_release>());
  nb::class_<KvCache> cache(m, "KvCache", kClassDoc);
  bind_receiving(cache);
  cache
      .def(
          "resume",
          [](KvCache& self, nb::handle stream) {
            const Stream on = to_stream("KvCache.resume", stream);
            return without_gil([&] { return self.resume(on); });
          },
          arg("stream") = 0, nb::sig("def resume(self, stream: int = 0) -> bool"),
          "Take an empty lease, and the pages of dense layers back to the GPU. False, and nothing "
          "changed, if there is no room, or a pool group would be used beyond max_util_for_resume.")
      .def(
          "suspend",
          [](KvCache& self, nb::handle stream) {
            const Stream on = to_stream("KvCache.suspend", stream);
            without_gil([&] { self.suspend(on); });
          },
          arg("stream") = 0, nb::sig("def suspend(self, stream: int = 0) -> None"),
          "Drop pending growth, flush the window, move pages of dense layers to the host, leave "
          "the "
          "Batch and return the lease.\n\n"
          "Raises InvalidState if CLOSED or in an open step, OutOfPages if the host lacks pages; "
          "the request then stays as it was.")
      .def("resize", &resize, arg("capacity"), arg("history_length"), arg("stream") = 0,
           nb::sig("def resize(self, capacity: int, history_length: int, stream: int = 0) -> bool"),
           "`history_length` tokens are computed, what comes next writes up to `capacity`.\n\n"
           "Not seated, a prefill: pages of dense layers alone. Seated: as `Batch.resize_tokens`. "
           "False, and nothing changed, if pages lack.")
      .def("close", &KvCache::close, nb::call_guard<nb::gil_scoped_release>(),
           "Leave the Batch and return pages and lease, at the latest when an open step ends.")
      .def("import_history", &import_history, arg("layers"), arg("stream") = 0,
           nb::sig("def import_history(self, layers: collections.abc.Mapping[int, "
                   "sparse_kvcm._typing.Array], stream: int = 0) -> None"),
           kImportDoc)
      .def(
          "decode_entries",
          [](const KvCache& self, nb::handle group) {
            const auto id = to_int<std::int32_t>("KvCache.decode_entries", "group", group);
            return without_gil([&] { return self.decode_entries(id); });
          },
          arg("group"), nb::sig("def decode_entries(self, group: int) -> list[DecodedEntry]"),
          "Entries of the lease in one selection group, slot by slot. Waits for the device.")
      .def_prop_ro("state", &KvCache::state, no_gil, "SUSPENDED, ACTIVE or CLOSED.")
      .def_prop_ro("need", &KvCache::need, "Most units it will ever have.")
      .def_prop_ro("length", &KvCache::length, no_gil, "Units, with pending growth.")
      .def_prop_ro("committed_length", &KvCache::committed_length, no_gil,
                   "Units of committed steps.")
      .def_prop_ro("watermark", &KvCache::watermark, no_gil, "Units that are in host history.")
      .def_prop_ro("window_begin", &KvCache::window_begin, no_gil,
                   "First unit that the window holds.")
      .def_prop_ro("lease", &KvCache::lease, no_gil,
                   "While ACTIVE, unless the manager is resident; else None.")
      .def_prop_ro("row", &KvCache::row, no_gil, "Its seat in a Batch, or None.")
      .def_prop_ro("host_pages", &KvCache::host_pages, no_gil,
                   "Host page ids, one per started page of the history.")
      .def_prop_ro("capacity", &KvCache::capacity, no_gil,
                   "Tokens that dense layers have pages for.")
      .def_prop_ro("history_length", &KvCache::history_length, no_gil, "Tokens that are computed.")
      .def(
          "get_base_page_indices",
          [](const KvCache& self, nb::handle layer_group) {
            const auto group =
                to_int<std::int32_t>("KvCache.get_base_page_indices", "layer_group", layer_group);
            return to_int32_array(without_gil([&] { return self.get_base_page_indices(group); }));
          },
          arg("layer_group"),
          nb::sig("def get_base_page_indices(self, layer_group: int) -> typing.Any"),
          "A copy of the page table of a layer group, int32 (pages,).")
      .def("set_base_page_index_buf", &set_index_buffer, arg("layer_group"), arg("buffer"),
           nb::sig("def set_base_page_index_buf(self, layer_group: int, "
                   "buffer: sparse_kvcm._typing.Array | None) -> None"),
           "Keep `buffer`, int32 (n,) in host memory, equal to the page table, -1 behind it; None "
           "ends that. It needs an entry for each page that the request may have.")
      .def("get_and_reset_statistics", &KvCache::get_and_reset_statistics,
           nb::call_guard<nb::gil_scoped_release>(),
           "Pages of this request since the last call, by layer group.")
      .def("__repr__", [](nb::handle self) {
        return nb::str("<KvCache {} length={} need={}>")
            .format(self.attr("state").attr("name"), self.attr("length"), self.attr("need"));
      });
}

}  // namespace sparse_kvcm::bindings
