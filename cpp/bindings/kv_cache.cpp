// KvCache: one request.
#include "sparse_kvcm/kv_cache.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <vector>

#include "args.hpp"
#include "array.hpp"
#include "bindings.hpp"
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
  cache.import_history(rows, checker.extent32("n"), to_stream(kFunction, stream));
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
time per manager.)";

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

}  // namespace

void bind_kv_cache(nb::module_& m) {
  bind_records(m);
  nb::class_<KvCache>(m, "KvCache", kClassDoc)
      .def(
          "resume",
          [](KvCache& self, nb::handle stream) {
            return self.resume(to_stream("KvCache.resume", stream));
          },
          arg("stream") = 0, nb::sig("def resume(self, stream: int = 0) -> bool"),
          "Take an empty lease. False, and nothing changed, if there is no room for it.")
      .def(
          "suspend",
          [](KvCache& self, nb::handle stream) {
            self.suspend(to_stream("KvCache.suspend", stream));
          },
          arg("stream") = 0, nb::sig("def suspend(self, stream: int = 0) -> None"),
          "Drop pending growth, flush the window, leave the Batch and return the lease.\n\n"
          "Raises InvalidState if CLOSED or in an open step, OutOfPages if host history lacks "
          "pages for the window; the request then stays as it was.")
      .def("close", &KvCache::close,
           "Leave the Batch and return pages and lease, at the latest when an open step ends.")
      .def("import_history", &import_history, arg("layers"), arg("stream") = 0,
           nb::sig("def import_history(self, layers: collections.abc.Mapping[int, "
                   "sparse_kvcm._typing.Array], stream: int = 0) -> None"),
           kImportDoc)
      .def(
          "decode_entries",
          [](const KvCache& self, nb::handle group) {
            return self.decode_entries(
                to_int<std::int32_t>("KvCache.decode_entries", "group", group));
          },
          arg("group"), nb::sig("def decode_entries(self, group: int) -> list[DecodedEntry]"),
          "Entries of the lease in one selection group, slot by slot. Waits for the device.")
      .def_prop_ro("state", &KvCache::state, "SUSPENDED, ACTIVE or CLOSED.")
      .def_prop_ro("need", &KvCache::need, "Most units it will ever have.")
      .def_prop_ro("length", &KvCache::length, "Units, with pending growth.")
      .def_prop_ro("committed_length", &KvCache::committed_length, "Units of committed steps.")
      .def_prop_ro("watermark", &KvCache::watermark, "Units that are in host history.")
      .def_prop_ro("window_begin", &KvCache::window_begin, "First unit that the window holds.")
      .def_prop_ro("lease", &KvCache::lease, "While ACTIVE, else None.")
      .def_prop_ro("row", &KvCache::row, "Its seat in a Batch, or None.")
      .def_prop_ro("host_pages", &KvCache::host_pages,
                   "Host page ids, one per started page of the history.")
      .def("__repr__", [](nb::handle self) {
        return nb::str("<KvCache {} length={} need={}>")
            .format(self.attr("state").attr("name"), self.attr("length"), self.attr("need"));
      });
}

}  // namespace sparse_kvcm::bindings
