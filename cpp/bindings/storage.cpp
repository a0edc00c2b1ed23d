// Storage: the pools of all tiers.
#include "sparse_kvcm/storage.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <new>

#include "args.hpp"
#include "array.hpp"
#include "bindings.hpp"
#include "gil.hpp"
#include "progress.hpp"
#include "record.hpp"
#include "sparse_kvcm/request_pages.hpp"

namespace sparse_kvcm::bindings {
namespace {

void bind_records(nb::module_& m) {
  nb::enum_<StorageFill>(m, "StorageFill", "When host pools are filled.")
      .value("IN_BACKGROUND", StorageFill::kInBackground, "while the storage is there already")
      .value("AT_ONCE", StorageFill::kAtOnce, "by its construction");
  Record<PoolDesc>(m, "PoolDesc", "One range of addresses, [num_slots, slot_bytes].")
      .field("base_address", &PoolDesc::base_address, "Its first byte.")
      .field("slot_bytes", &PoolDesc::slot_bytes, "Bytes from slot to slot.")
      .field("num_slots", &PoolDesc::num_slots,
             "Slots that there are, those that drain and those still to be filled included.")
      .field("num_usable", &PoolDesc::num_usable,
             "The first of them, which are filled: the others must not be touched yet.")
      .field("storage_medium", &PoolDesc::storage_medium, "Where it lies.")
      .done();
  using Pool = PoolGroupStatistics;
  Record<Pool>(m, "PoolGroupStatistics",
               "Slots of a pool group: total = available + unavailable, available = free + "
               "evictable.")
      .field("pool_group", &Pool::pool_group, "Its id.")
      .field("slot_bytes", &Pool::slot_bytes, "Of each pool.")
      .field("total", &Pool::total, "All.")
      .field("free", &Pool::free, "Can be had now.")
      .field("evictable", &Pool::evictable, "0 as long as no page outlives its request.")
      .field("available", &Pool::available, "Free or evictable.")
      .field("unavailable", &Pool::unavailable, "In use, or not filled yet.")
      .field("draining", &Pool::draining, "In use beyond the size that a shrink has set.")
      .done();
  using Group = LayerGroupStatistics;
  Record<Group>(m, "LayerGroupStatistics", "Pages of a layer group since the last call.")
      .field("num_taken", &Group::num_taken, "Slots taken.")
      .field("num_returned", &Group::num_returned, "Slots given back.")
      .field("num_refused", &Group::num_refused, "Calls that found too few.")
      .field("num_copied_to_host", &Group::num_copied_to_host, "Pages that a suspend copied.")
      .field("num_copied_to_gpu", &Group::num_copied_to_gpu, "Pages that a resume copied.")
      .done();
}

void make_storage(Storage* self, nb::handle config, nb::handle fill, nb::handle progress) {
  const auto& checked = to_instance<StorageConfig>("Storage", "config", config);
  StorageOptions options{to_enum<StorageFill>("Storage", "fill", fill)};
  if (options.fill == StorageFill::kAtOnce) {
    options.progress = to_progress("Storage", progress);
  } else if (!progress.is_none()) {
    fail_argument("Storage", "progress needs fill=StorageFill.AT_ONCE, got IN_BACKGROUND");
  }
  const nb::gil_scoped_release unlocked;
  new (self) Storage(checked, options);
}

// Methods of one buffer, and of one buffer in a mode.
template <class Method>
auto by_buffer(const char* function, Method method) {
  return [function, method](const Storage& self, nb::handle layer_id, nb::handle role) {
    const auto id = to_int<std::int32_t>(function, "layer_id", layer_id);
    const std::string name = to_text(function, "role", role);
    return without_gil([&] { return (self.*method)(id, name); });
  };
}

template <class Method>
auto by_buffer_and_mode(const char* function, Method method) {
  return [function, method](const Storage& self, nb::handle layer_id, nb::handle role,
                            nb::handle mode) {
    return (self.*method)(to_int<std::int32_t>(function, "layer_id", layer_id),
                          to_text(function, "role", role),
                          to_enum<PageIndexMode>(function, "mode", mode));
  };
}

template <class Method>
auto by_level(const char* function, Method method) {
  return [function, method](const Storage& self, nb::handle level) {
    const auto id = to_int<std::int32_t>(function, "level", level);
    return without_gil([&] { return (self.*method)(id); });
  };
}

nb::object pool_memory(const Storage& self, nb::handle pool_group, nb::handle pool) {
  constexpr const char* kFunction = "Storage.pool_memory";
  const auto group = to_int<std::int32_t>(kFunction, "pool_group", pool_group);
  const auto index = to_int<std::int32_t>(kFunction, "pool", pool);
  const MemoryView view = without_gil([&] { return self.pool_memory(group, index); });
  const Device device = view.data != nullptr ? Device{} : self.config().device;
  return to_python(device, reinterpret_cast<std::uint8_t*>(view.device_data), view.shape,
                   view.owner);
}

void bind_addressing(nb::class_<Storage>& storage) {
  using S = Storage;
  storage
      .def("get_mem_pool_base_address",
           by_buffer_and_mode("Storage.get_mem_pool_base_address", &S::get_mem_pool_base_address),
           arg("layer_id"), arg("role"), arg("mode"),
           nb::sig("def get_mem_pool_base_address(self, layer_id: int, role: str, "
                   "mode: PageIndexMode) -> int"),
           "What page indices of `mode` count from.")
      .def("get_page_stride", by_buffer("Storage.get_page_stride", &S::get_page_stride),
           arg("layer_id"), arg("role"),
           nb::sig("def get_page_stride(self, layer_id: int, role: str) -> int"),
           "Bytes from page index to page index.")
      .def("get_page_index_scale",
           by_buffer("Storage.get_page_index_scale", &S::get_page_index_scale), arg("layer_id"),
           arg("role"), nb::sig("def get_page_index_scale(self, layer_id: int, role: str) -> int"),
           "Pages of the buffer's size per slot.")
      .def("get_page_index_upper_bound",
           by_buffer("Storage.get_page_index_upper_bound", &S::get_page_index_upper_bound),
           arg("layer_id"), arg("role"),
           nb::sig("def get_page_index_upper_bound(self, layer_id: int, role: str) -> int"),
           "Page indices of mode SHARED are below it, those of slots that drain too.")
      .def("get_page_index_converter",
           by_buffer_and_mode("Storage.get_page_index_converter", &S::get_page_index_converter),
           arg("layer_id"), arg("role"), arg("mode"),
           nb::sig("def get_page_index_converter(self, layer_id: int, role: str, "
                   "mode: PageIndexMode) -> PageIndexConverter"),
           "From slots to page indices. Refused for a sparse buffer, which has none.")
      .def("supports_index_mode",
           by_buffer_and_mode("Storage.supports_index_mode", &S::supports_index_mode),
           arg("layer_id"), arg("role"), arg("mode"),
           nb::sig("def supports_index_mode(self, layer_id: int, role: str, "
                   "mode: PageIndexMode) -> bool"),
           "False for SHARED where a window has scratch pages, and for sparse buffers.")
      .def("is_sparse", by_buffer("Storage.is_sparse", &S::is_sparse), arg("layer_id"), arg("role"),
           nb::sig("def is_sparse(self, layer_id: int, role: str) -> bool"),
           "Whether the buffer's history is on the host.")
      .def("pool_group_descs", &S::pool_group_descs, nb::call_guard<nb::gil_scoped_release>(),
           "Pools of each pool group.")
      .def("pool_memory", &pool_memory, arg("pool_group"), arg("pool"),
           nb::sig("def pool_memory(self, pool_group: int, pool: int) -> typing.Any"),
           "Memory of one pool, uint8 (num_slots, slot_bytes) as in its PoolDesc.\n\n"
           "Slots at or beyond num_usable must not be touched yet, those that a later shrink takes "
           "away\nnot any more.");
}

void bind_capacity(nb::class_<Storage>& storage) {
  using S = Storage;
  storage
      .def("get_storage_statistics",
           by_level("Storage.get_storage_statistics", &S::get_storage_statistics), arg("level"),
           nb::sig("def get_storage_statistics(self, level: int) -> list[PoolGroupStatistics]"),
           "Slots of every pool group at a level.")
      .def("get_and_reset_statistics", &S::get_and_reset_statistics,
           nb::call_guard<nb::gil_scoped_release>(),
           "Pages that moved in each layer group since the last call.")
      .def("get_num_bytes", by_level("Storage.get_num_bytes", &S::get_num_bytes), arg("level"),
           nb::sig("def get_num_bytes(self, level: int) -> int"), "Bytes that are mapped.")
      .def("get_quota", by_level("Storage.get_quota", &S::get_quota), arg("level"),
           nb::sig("def get_quota(self, level: int) -> int"), "Bytes.")
      .def(
          "resize",
          [](S& self, nb::handle level, nb::handle quota) {
            constexpr const char* kFunction = "Storage.resize";
            const auto id = to_int<std::int32_t>(kFunction, "level", level);
            const auto bytes = to_int<std::int64_t>(kFunction, "quota", quota);
            without_gil([&] { self.resize(id, bytes); });
          },
          arg("level"), arg("quota"), nb::sig("def resize(self, level: int, quota: int) -> None"),
          "Give a tier another quota.\n\nWhat shrinks gives up free slots now and others as they "
          "come back; no live slot moves.\n\nRaises\n------\nMemoryError\n    If memory lacks; "
          "nothing has changed then.\nInvalidState\n    If the storage is a manager's.")
      .def("trim", &S::trim, nb::call_guard<nb::gil_scoped_release>(),
           "Unmap what shrinking has drained. Waits for the device.")
      .def(
          "wait_usable",
          [](const S& self, nb::handle level) {
            const auto id = to_int<std::int32_t>("Storage.wait_usable", "level", level);
            without_gil([&] { self.wait_usable(id); });
          },
          arg("level"), nb::sig("def wait_usable(self, level: int) -> None"),
          "Wait until the pools of a level are filled. From any thread, at any time.")
      .def_prop_ro("warnings", &S::warnings,
                   "What did not go as wished so far, a sentence each: memory on another NUMA "
                   "node,\nor an environment variable that is not understood.")
      .def(
          "clamp_max_seq_len_for_mem",
          [](const S& self, nb::handle batch_size, nb::handle upper) {
            constexpr const char* kFunction = "Storage.clamp_max_seq_len_for_mem";
            const auto size = to_int<std::int32_t>(kFunction, "batch_size", batch_size);
            const auto most = to_int<std::int32_t>(kFunction, "upper", upper);
            return without_gil([&] { return self.clamp_max_seq_len_for_mem(size, most); });
          },
          arg("batch_size"), arg("upper"),
          nb::sig("def clamp_max_seq_len_for_mem(self, batch_size: int, upper: int) -> int"),
          "The longest sequence, at most `upper`, that fits beside batch_size - 1 requests of one "
          "token.")
      .def(
          "create_request_pages",
          [](S& self, nb::handle expected_length) {
            return self.create_request_pages(to_int<std::int32_t>(
                "Storage.create_request_pages", "expected_length", expected_length));
          },
          arg("expected_length") = 0,
          nb::sig("def create_request_pages(self, expected_length: int = 0) -> RequestPages"),
          "A request without pages. `expected_length` keeps its host pages in one run.");
}

constexpr const char* kStorageDoc = R"(The pools of all tiers, and the slots in them.

Addresses never move; memory is mapped and unmapped as tiers grow and shrink. Host pools fill in the
background unless told otherwise. Any thread may call it, its RequestPages included: calls take
turns, but for `wait_usable`, and let other threads run Python meanwhile.

Parameters
----------
config : StorageConfig
fill : StorageFill
    IN_BACKGROUND, the default, or AT_ONCE: host pools are filled when the constructor returns.
progress : callable, optional
    With AT_ONCE: called now and then as ``progress(bytes_done, bytes_total)``, ascending. What it
    raises ends the work, and all memory is given back.

Raises
------
NotAvailable
    If the device is not there.
MemoryError
    If memory lacks.

Examples
--------
>>> import sparse_kvcm as kvcm
>>> layers = [kvcm.LayerConfig(i, [kvcm.BufferConfig("KEY", 4096)]) for i in range(3)]
>>> storage = kvcm.Storage(kvcm.StorageConfig(
...     cache_tiers=[kvcm.CacheTierConfig(kvcm.CacheTier.GPU_MEM, 4 << 20)], layers=layers))
>>> request = storage.create_request_pages()
>>> request.resize(capacity=100, history_length=0)
True
>>> converter = storage.get_page_index_converter(1, "KEY", kvcm.PageIndexMode.PER_LAYER)
>>> converter.convert(request.get_base_page_indices(0))
array([1, 4], dtype=int32))";

}  // namespace

void bind_storage(nb::module_& m) {
  bind_records(m);
  nb::class_<Storage> storage(m, "Storage", kStorageDoc);
  storage
      .def("__init__", &make_storage, arg("config"), arg("fill") = StorageFill::kInBackground,
           arg("progress") = nb::none(),
           nb::sig("def __init__(self, config: StorageConfig, "
                   "fill: StorageFill = ..., "
                   "progress: collections.abc.Callable[[int, int], object] | None = None) "
                   "-> None"))
      .def_prop_ro("config", &Storage::config, nb::rv_policy::copy, "What it was made from.")
      .def_prop_ro("layout", &Storage::layout, "Groups, places and sizes.");
  bind_addressing(storage);
  bind_capacity(storage);
}

}  // namespace sparse_kvcm::bindings
