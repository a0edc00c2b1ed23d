// StorageLayout: what follows from a StorageConfig without memory.
#include "sparse_kvcm/storage_layout.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <new>

#include "args.hpp"
#include "bindings.hpp"
#include "record.hpp"

namespace sparse_kvcm::bindings {
namespace {

void bind_records(nb::module_& m) {
  Record<BufferId>(m, "BufferId", "A buffer of a layer.")
      .field("layer_id", &BufferId::layer_id, "The layer.")
      .field("role", &BufferId::role, "The role.")
      .done();
  Record<CoalescedBuffer>(m, "CoalescedBuffer",
                          "Buffers of a layer group with equal bytes per page, side by side.")
      .field("buffer_bytes", &CoalescedBuffer::buffer_bytes,
             "Of one buffer in a page: all its kernel pages.")
      .field("buffers", &CoalescedBuffer::buffers, "In the order in which they lie.")
      .field("scratch_pages_per_page", &CoalescedBuffer::scratch_pages_per_page,
             "Most of these buffers that one layer has.")
      .done();
  Record<LayerGroupDesc>(m, "LayerGroupDesc", "Layers with one life cycle.")
      .field("life_cycle", &LayerGroupDesc::life_cycle, "When their pages are needed.")
      .field("layers", &LayerGroupDesc::layers, "Layer ids.")
      .field("slot", &LayerGroupDesc::slot, "Coalesced buffers of one page, largest first.")
      .field("pool_group", &LayerGroupDesc::pool_group, "Where its pages live.")
      .field("cold_pool_group", &LayerGroupDesc::cold_pool_group,
             "Where suspended pages go; -1 if nowhere.")
      .done();
  Record<PoolGroupDesc>(m, "PoolGroupDesc", "Layer groups that share slots.")
      .field("level", &PoolGroupDesc::level, "0 = GPU, 1 = host.")
      .field("is_sparse", &PoolGroupDesc::is_sparse, "Host history of sparse layers.")
      .field("is_cold", &PoolGroupDesc::is_cold, "Suspended pages of dense layers.")
      .field("layer_groups", &PoolGroupDesc::layer_groups, "Layer group ids.")
      .field("slot_bytes", &PoolGroupDesc::slot_bytes, "Of each pool.")
      .done();
  Record<BufferPlace>(m, "BufferPlace", "Where one buffer lies, the pool's base aside.")
      .field("layer_group", &BufferPlace::layer_group, "Its layer group.")
      .field("pool_group", &BufferPlace::pool_group, "Its pool group.")
      .field("pool", &BufferPlace::pool, "The pool within it.")
      .field("is_sparse", &BufferPlace::is_sparse, "It has no page index then.")
      .field("page_bytes", &BufferPlace::page_bytes, "From page index to page index.")
      .field("converter", &BufferPlace::converter, "In mode PER_LAYER.")
      .field("offset_bytes", &BufferPlace::offset_bytes, "Within the slot.")
      .done();
}

void make_layout(StorageLayout* self, nb::handle config) {
  new (self) StorageLayout(to_instance<StorageConfig>("StorageLayout", "config", config));
}

std::vector<std::int64_t> to_int64s(const char* function, std::string_view name, nb::handle value) {
  std::vector<std::int64_t> result;
  for (const nb::object& item : to_items(function, name, value, "ints")) {
    result.push_back(to_int<std::int64_t>(function, item_name(name, result.size()), item));
  }
  return result;
}

// Methods of one level, by name.
template <class Method>
auto by_level(const char* function, Method method) {
  return [function, method](const StorageLayout& self, nb::handle level) {
    return (self.*method)(to_int<std::int32_t>(function, "level", level));
  };
}

void bind_structure(nb::class_<StorageLayout>& layout) {
  using Layout = StorageLayout;
  layout.def_prop_ro("layer_groups", &Layout::layer_groups, "Layer groups.")
      .def_prop_ro("pool_groups", &Layout::pool_groups,
                   "Those of dense layer groups, then the sparse one, then cold ones.")
      .def_prop_ro("num_levels", &Layout::num_levels, "Tiers.")
      .def("layer_grouping", &Layout::layer_grouping, "The layers of each layer group.")
      .def("all_buffer_ids", &Layout::all_buffer_ids, "All buffers, in the order of the config.")
      .def(
          "get_layer_group_id",
          [](const Layout& self, nb::handle layer_id) {
            return self.get_layer_group_id(
                to_int<std::int32_t>("StorageLayout.get_layer_group_id", "layer_id", layer_id));
          },
          arg("layer_id"), nb::sig("def get_layer_group_id(self, layer_id: int) -> int"),
          "The layer group of a layer.")
      .def(
          "place",
          [](const Layout& self, nb::handle layer_id, nb::handle role) -> BufferPlace {
            constexpr const char* kFunction = "StorageLayout.place";
            return self.place(to_int<std::int32_t>(kFunction, "layer_id", layer_id),
                              to_text(kFunction, "role", role));
          },
          arg("layer_id"), arg("role"),
          nb::sig("def place(self, layer_id: int, role: str) -> BufferPlace"),
          "Where a buffer lies.");
}

void bind_sizes(nb::class_<StorageLayout>& layout) {
  using Layout = StorageLayout;
  layout
      .def(
          "count_slots",
          [](const Layout& self, nb::handle batch) {
            return self.count_slots(
                to_instance<BatchDesc>("StorageLayout.count_slots", "batch", batch));
          },
          arg("batch"), nb::sig("def count_slots(self, batch: BatchDesc) -> list[int]"),
          "Slots that a batch takes in each pool group.")
      .def("min_slots", &Layout::min_slots, "The least slots of each pool group.")
      .def("pool_ratio", &Layout::pool_ratio,
           "The share of its tier's bytes that each pool group is to have.")
      .def("granule_bytes", by_level("StorageLayout.granule_bytes", &Layout::granule_bytes),
           arg("level"), nb::sig("def granule_bytes(self, level: int) -> int"),
           "The unit in which a level's pools map memory.")
      .def("min_quota", by_level("StorageLayout.min_quota", &Layout::min_quota), arg("level"),
           nb::sig("def min_quota(self, level: int) -> int"), "The least quota of a level.")
      .def(
          "get_num_bytes",
          [](const Layout& self, nb::handle pool_group, nb::handle num_slots) {
            constexpr const char* kFunction = "StorageLayout.get_num_bytes";
            return self.get_num_bytes(to_int<std::int32_t>(kFunction, "pool_group", pool_group),
                                      to_int<std::int64_t>(kFunction, "num_slots", num_slots));
          },
          arg("pool_group"), arg("num_slots"),
          nb::sig("def get_num_bytes(self, pool_group: int, num_slots: int) -> int"),
          "Bytes that so many slots of a pool group take, in granules per pool.")
      .def(
          "effective_quota",
          [](const Layout& self, nb::handle level, nb::handle quota) {
            constexpr const char* kFunction = "StorageLayout.effective_quota";
            return self.effective_quota(to_int<std::int32_t>(kFunction, "level", level),
                                        to_int<std::int64_t>(kFunction, "quota", quota));
          },
          arg("level"), arg("quota"),
          nb::sig("def effective_quota(self, level: int, quota: int) -> int"),
          "What a quota becomes: whole granules, at least `min_quota`.")
      .def(
          "slots_for_quota",
          [](const Layout& self, nb::handle level, nb::handle quota) {
            constexpr const char* kFunction = "StorageLayout.slots_for_quota";
            return self.slots_for_quota(to_int<std::int32_t>(kFunction, "level", level),
                                        to_int<std::int64_t>(kFunction, "quota", quota));
          },
          arg("level"), arg("quota"),
          nb::sig("def slots_for_quota(self, level: int, quota: int) -> list[int]"),
          "Slots of each pool group under a quota; 0 in those of other levels.")
      .def(
          "clamp_max_seq_len",
          [](const Layout& self, nb::handle totals, nb::handle batch_size, nb::handle upper) {
            constexpr const char* kFunction = "StorageLayout.clamp_max_seq_len";
            return self.clamp_max_seq_len(to_int64s(kFunction, "totals", totals),
                                          to_int<std::int32_t>(kFunction, "batch_size", batch_size),
                                          to_int<std::int32_t>(kFunction, "upper", upper));
          },
          arg("totals"), arg("batch_size"), arg("upper"),
          nb::sig("def clamp_max_seq_len(self, totals: collections.abc.Sequence[int], "
                  "batch_size: int, upper: int) -> int"),
          "As `Storage.clamp_max_seq_len_for_mem`, with `totals` slots per pool group.");
}

constexpr const char* kLayoutDoc =
    R"(What follows from a config without memory: groups, places in slots, sizes. Immutable.

Planned bytes are allocated bytes: `Storage` uses the same object.

Parameters
----------
config : StorageConfig

Raises
------
InvalidArgument
    If ``initial_pool_ratio`` has another number of weights than there are pool groups.

Examples
--------
>>> import sparse_kvcm as kvcm
>>> layers = [kvcm.LayerConfig(i, [kvcm.BufferConfig("KEY", 4096)]) for i in range(3)]
>>> layout = kvcm.StorageLayout(kvcm.StorageConfig(
...     cache_tiers=[kvcm.CacheTierConfig(kvcm.CacheTier.GPU_MEM, 64 << 20)], layers=layers))
>>> layout.pool_groups[0].slot_bytes
[12288]
>>> layout.place(2, "KEY").offset_bytes
8192
>>> layout.slots_for_quota(0, 64 << 20)
[5461])";

}  // namespace

void bind_storage_layout(nb::module_& m) {
  bind_records(m);
  nb::class_<StorageLayout> layout(m, "StorageLayout", kLayoutDoc);
  layout.def("__init__", &make_layout, arg("config"),
             nb::sig("def __init__(self, config: StorageConfig) -> None"));
  bind_structure(layout);
  bind_sizes(layout);
  m.def("sparse_backing_medium", &sparse_backing_medium,
        "Where sparse layers have their history, whatever the config.");
}

}  // namespace sparse_kvcm::bindings
