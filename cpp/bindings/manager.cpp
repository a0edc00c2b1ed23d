// KvCacheManager: owns all memory and makes requests and Batches.
#include "sparse_kvcm/kv_cache_manager.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <new>
#include <string>
#include <utility>

#include "args.hpp"
#include "array.hpp"
#include "bindings.hpp"
#include "gil.hpp"
#include "progress.hpp"
#include "record.hpp"
#include "sparse_kvcm/storage.hpp"

namespace sparse_kvcm::bindings {
namespace {

void make_manager(KvCacheManager* self, nb::handle config, nb::handle progress) {
  const auto& checked = to_instance<KvCacheManagerConfig>("KvCacheManager", "config", config);
  const KvCacheManagerOptions options{to_progress("KvCacheManager", progress)};
  std::shared_ptr<ManagerState> state;
  {
    const nb::gil_scoped_release released;
    state = KvCacheManager(checked, options).state();
  }
  const KvCacheManager made(state);
  for (const std::string& warning : made.warnings()) {
    // A filter may turn it into an exception; then there is no manager.
    if (PyErr_WarnEx(PyExc_RuntimeWarning, warning.c_str(), 1) != 0) nb::raise_python_error();
  }
  new (self) KvCacheManager(std::move(state));
}

// A length that the request may have. Not left to the callee, whose limit an int past 32 bits would
// not reach.
std::int32_t to_units(const char* function, const char* name, nb::handle value) {
  return static_cast<std::int32_t>(to_int64(function, name, value, 1, kMaxUnits));
}

std::shared_ptr<KvCache> create_kv_cache(KvCacheManager& self, nb::handle need,
                                         nb::handle cached_slots) {
  constexpr const char* kFunction = "KvCacheManager.create_kv_cache";
  KvCacheOptions options{.need = to_units(kFunction, "need", need)};
  if (!cached_slots.is_none()) {
    // A negative number stands for the manager's own in C++; here None does.
    options.cached_slots = static_cast<std::int32_t>(
        to_int64(kFunction, "cached_slots", cached_slots, 0, kMaxCachedSlots));
  }
  return ended_without_gil(without_gil([&] { return self.create_kv_cache(options); }));
}

std::shared_ptr<Batch> create_batch(KvCacheManager& self, nb::handle max_rows, nb::handle max_units,
                                    nb::handle no_write_slot) {
  constexpr const char* kFunction = "KvCacheManager.create_batch";
  const BatchOptions options{
      .max_rows = to_int<std::int32_t>(kFunction, "max_rows", max_rows),
      .max_units = to_units(kFunction, "max_units", max_units),
      .no_write_slot = to_int<std::int32_t>(kFunction, "no_write_slot", no_write_slot)};
  return ended_without_gil(without_gil([&] { return self.create_batch(options); }));
}

nb::object arena(const KvCacheManager& self, nb::handle layer) {
  const MemoryView view = self.arena(to_int<std::int32_t>("KvCacheManager.arena", "layer", layer));
  return to_python(self.config().device, reinterpret_cast<std::uint8_t*>(view.device_data),
                   view.shape, view.owner);
}

nb::object host_history(const KvCacheManager& self, nb::handle group) {
  const MemoryView view =
      self.host_history(to_int<std::int32_t>("KvCacheManager.host_history", "group", group));
  return to_python(Device{}, reinterpret_cast<std::uint8_t*>(view.data), view.shape, view.owner);
}

void bind_records(nb::module_& m) {
  Record<MemoryUse>(m, "MemoryUse", "Bytes that a manager holds.")
      .field("arena_bytes", &MemoryUse::arena_bytes,
             "Device: leases of all member layers, trash page included.")
      .field("metadata_bytes", &MemoryUse::metadata_bytes,
             "Device: entries and clocks of all groups.")
      .field("dense_bytes", &MemoryUse::dense_bytes, "Device: pools of dense layers.")
      .field("host_bytes", &MemoryUse::host_bytes, "Pinned host history.")
      .field("cold_bytes", &MemoryUse::cold_bytes,
             "Pinned host memory for dense pages of suspended requests.")
      .done();
  m.def(
      "planned_memory",
      [](nb::handle config) {
        return planned_memory(
            to_instance<KvCacheManagerConfig>("planned_memory", "config", config));
      },
      arg("config"), nb::sig("def planned_memory(config: KvCacheManagerConfig) -> MemoryUse"),
      "What `memory_use` of a manager of `config` will say; takes no memory.");
  Record<Occupancy>(m, "Occupancy", "Pages and slots that are free.")
      .field("free_host_pages", &Occupancy::free_host_pages, "Per selection group.")
      .field("free_arena_slots", &Occupancy::free_arena_slots, "Per member layer.")
      .field("largest_free_arena_run", &Occupancy::largest_free_arena_run,
             "Slots of the largest lease that can be had now.")
      .field("free_leases", &Occupancy::free_leases, "Lease ids.")
      .done();
  Record<PoolGroupUse>(m, "PoolGroupUse", "A pool group, and how full it is.")
      .field("slots", &PoolGroupUse::slots, "Its slots.")
      .field("level", &PoolGroupUse::level, "0 the GPU, 1 the host.")
      .field("utilization", &PoolGroupUse::utilization,
             "Of its slots that are in use; what max_util_for_resume bounds on the GPU.")
      .done();
  Record<CopyStatistics>(m, "CopyStatistics",
                         "What was copied between GPU and host, fetches apart.")
      .field("pages_to_host", &CopyStatistics::pages_to_host, "Of dense layers, by suspend.")
      .field("pages_to_gpu", &CopyStatistics::pages_to_gpu, "By resume.")
      .field("units_to_host", &CopyStatistics::units_to_host, "Flushed by publish and suspend.")
      .field("units_to_gpu", &CopyStatistics::units_to_gpu, "Loaded into windows.")
      .field("bytes_to_host", &CopyStatistics::bytes_to_host, "Of both.")
      .field("bytes_to_gpu", &CopyStatistics::bytes_to_gpu, "Of both.")
      .done();
}

constexpr const char* kClassDoc =
    R"(Owns host history, the arena and all metadata; makes requests and Batches.

All memory is taken here and given back when the manager, its last request, its last Batch and the
last array over its memory are gone. Many threads may work on it; a request, and a Batch with the
requests in it, belongs to one at a time.

Parameters
----------
config : KvCacheManagerConfig
progress : callable, optional
    Called with ``(bytes_done, bytes_total)``, on this thread, while host history is touched and
    pinned, which goes at some 10 GB/s. An exception that it raises ends the construction, and
    nothing stays behind. Other threads run meanwhile.

Raises
------
NotAvailable
    If the device is not there.
MemoryError
    If memory lacks. Names the limit: the machine's memory, a control group, memlock.

Warns
-----
RuntimeWarning
    If host history is not on the GPU's NUMA node, or ``SPARSE_KVCM_THP`` neither 0 nor 1.

Examples
--------
>>> import sparse_kvcm as kvcm
>>> group = kvcm.SelectionGroupConfig([0, 1], top_k=64, layout=kvcm.UnitLayout([1152]))
>>> manager = kvcm.KvCacheManager(kvcm.KvCacheManagerConfig(
...     groups=[group], cached_slots=128, window_slots=64, arena_pages=6, host_pages=32,
...     max_leases=2))
>>> cache = manager.create_kv_cache(need=1024)
>>> cache.resume()
True
>>> manager.arena(1).shape
(7, 73728))";

constexpr const char* kCreateCacheDoc =
    R"(Make a SUSPENDED request without history. Takes no memory yet.

Parameters
----------
need : int
    Most units it will ever have, in [1, 2**24 - 1].
cached_slots : int, optional
    N of its leases, a multiple of a page; the manager's by default.

Raises
------
InvalidArgument
    If a value is outside its limits, or the lease larger than the arena.)";

constexpr const char* kCreateBatchDoc = R"(Make an empty Batch.

Parameters
----------
max_rows : int
    Seats, and the most rows of one launch.
max_units : int
    Largest ``need`` that may be seated.
no_write_slot : int
    What write slots that name no unit are filled with: -1, or `trash_slot` for writers that
    cannot skip.)";

}  // namespace

void bind_manager(nb::module_& m) {
  using Manager = KvCacheManager;
  bind_records(m);
  nb::class_<Manager>(m, "KvCacheManager", kClassDoc)
      .def("__init__", &make_manager, arg("config"), arg("progress") = nb::none(),
           nb::sig("def __init__(self, config: KvCacheManagerConfig, "
                   "progress: collections.abc.Callable[[int, int], object] | None = None) "
                   "-> None"))
      .def("create_kv_cache", &create_kv_cache, arg("need"), arg("cached_slots") = nb::none(),
           nb::sig("def create_kv_cache(self, need: int, cached_slots: int | None = None) -> "
                   "KvCache"),
           kCreateCacheDoc)
      .def("create_batch", &create_batch, arg("max_rows"), arg("max_units"),
           arg("no_write_slot") = kNoSlot,
           nb::sig("def create_batch(self, max_rows: int, max_units: int, "
                   "no_write_slot: int = -1) -> Batch"),
           kCreateBatchDoc)
      .def(
          "group_of",
          [](const Manager& self, nb::handle layer) {
            return self.group_of(to_int<std::int32_t>("KvCacheManager.group_of", "layer", layer));
          },
          arg("layer"), nb::sig("def group_of(self, layer: int) -> int"),
          "The selection group of a layer.")
      .def("arena", &arena, arg("layer"), nb::sig("def arena(self, layer: int) -> typing.Any"),
           "Device memory of one member layer, uint8 (arena_pages + 1, page_bytes).\n\n"
           "The last page is trash. Same memory on every call; the array keeps it alive.")
      .def("host_history", &host_history, arg("group"),
           nb::sig("def host_history(self, group: int) -> typing.Any"),
           "Host memory of one group, uint8 (host_pages, units_per_page, host_unit_bytes).")
      .def_prop_ro(
          "storage",
          [](const Manager& self) { return std::const_pointer_cast<Storage>(self.storage()); },
          nb::sig("def storage(self) -> Storage"),
          "The `Storage` that host history lives in, to look at: it cannot be resized, and gives\n"
          "nobody else pages.")
      .def("memory_use", &Manager::memory_use, "Bytes held.")
      .def("occupancy", &Manager::occupancy, nb::call_guard<nb::gil_scoped_release>(),
           "Pages and slots that are free.")
      .def("pool_group_use", &Manager::pool_group_use, nb::call_guard<nb::gil_scoped_release>(),
           "All pool groups of the storage, in its order.")
      .def("get_and_reset_copy_statistics", &Manager::get_and_reset_copy_statistics,
           nb::call_guard<nb::gil_scoped_release>(), "What was copied since the last call.")
      .def_prop_ro("poison_reason", &Manager::poison_reason,
                   nb::for_getter(nb::call_guard<nb::gil_scoped_release>()),
                   "Why every call but close() raises CorruptedError; empty if they do not.")
      .def_prop_ro("config", &Manager::config, nb::rv_policy::copy, "What it was made from.")
      .def_prop_ro("num_groups", &Manager::num_groups, "Selection groups.")
      .def_prop_ro("layers", &Manager::layers,
                   "Layer ids of all member layers, group by group, leader first.")
      .def_prop_ro("trash_slot", &Manager::trash_slot,
                   "First slot of the trash page, which may be written freely.");
}

}  // namespace sparse_kvcm::bindings
