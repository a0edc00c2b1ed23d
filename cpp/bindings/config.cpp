// Devices, layouts and the manager's configuration.
#include "sparse_kvcm/config.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <new>

#include "args.hpp"
#include "bindings.hpp"
#include "common_fields.hpp"
#include "record.hpp"
#include "sparse_kvcm/device.hpp"
#include "sparse_kvcm/unit_layout.hpp"

namespace sparse_kvcm::bindings {
namespace {

void make_layout(UnitLayout* self, nb::handle region_bytes, nb::handle page_alignment) {
  new (self) UnitLayout(to_int32s("UnitLayout", "region_bytes", region_bytes),
                        to_int<std::int32_t>("UnitLayout", "page_alignment", page_alignment));
}

void bind_layout(nb::module_& m) {
  nb::class_<UnitLayout>(m, "UnitLayout",
                         R"(The bytes of one unit in one member layer. Immutable.

Parameters
----------
region_bytes : sequence of int
    Bytes per unit of each region, 1 to 4 of them, e.g. ``[656]`` or ``[576, 8]``. Each is a
    multiple of 4 in [4, 65536].
page_alignment : int
    Arena pages are rounded up to a multiple of it, in bytes. In [1, 65536].

Raises
------
InvalidArgument
    If a value is outside these limits.)")
      .def("__init__", &make_layout, arg("region_bytes"), arg("page_alignment") = 1,
           nb::sig("def __init__(self, region_bytes: collections.abc.Sequence[int], "
                   "page_alignment: int = 1) -> None"))
      .def_prop_ro("region_bytes", &UnitLayout::region_bytes, "Bytes per unit of each region.")
      .def_prop_ro("page_alignment", &UnitLayout::page_alignment,
                   "What arena pages are rounded up to, in bytes.")
      .def_prop_ro("unit_bytes", &UnitLayout::unit_bytes,
                   "Bytes of one unit in one member layer, all regions.")
      .def(
          "page_bytes",
          [](const UnitLayout& self, nb::handle units_per_page) {
            return self.page_bytes(
                to_int<std::int32_t>("UnitLayout.page_bytes", "units_per_page", units_per_page));
          },
          arg("units_per_page"), nb::sig("def page_bytes(self, units_per_page: int) -> int"),
          "Bytes of one arena page of one member layer.")
      .def(
          "region_offset",
          [](const UnitLayout& self, nb::handle region, nb::handle units_per_page) {
            constexpr const char* kFunction = "UnitLayout.region_offset";
            return self.region_offset(
                to_int<std::int32_t>(kFunction, "region", region),
                to_int<std::int32_t>(kFunction, "units_per_page", units_per_page));
          },
          arg("region"), arg("units_per_page"),
          nb::sig("def region_offset(self, region: int, units_per_page: int) -> int"),
          "Where a region begins within an arena page, in bytes.")
      .def(
          "__eq__", [](const UnitLayout& self, const UnitLayout& other) { return self == other; },
          nb::is_operator(), nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def("__hash__",
           [](const UnitLayout& self) {
             const nb::tuple regions(nb::cast(self.region_bytes()));
             return nb::hash(nb::make_tuple(regions, self.page_alignment()));
           })
      .def("__repr__", [](const UnitLayout& self) {
        return nb::str("UnitLayout({}, {})")
            .format(nb::cast(self.region_bytes()), self.page_alignment());
      });
}

void bind_host_row(nb::module_& m) {
  Record<HostPiece>(m, "HostPiece", "One piece of a host unit row.")
      .field("member", &HostPiece::member, "Index into the group's member layers.")
      .field("region", &HostPiece::region, "Region of the layout.")
      .field("bytes", &HostPiece::bytes, "Its length.")
      .field("offset", &HostPiece::offset, "Where it begins within the row, in bytes.")
      .done();
  Record<HostRowLayout>(m, "HostRowLayout", "The packed host row of one selection group.")
      .field("pieces", &HostRowLayout::pieces, "Pieces in the order in which they lie.")
      .field("unit_bytes", &HostRowLayout::unit_bytes,
             "Stride from unit to unit in bytes, a multiple of 16.")
      .done();
  m.def(
      "host_row",
      [](nb::handle layout, nb::handle num_members) {
        return pack_host_row(to_instance<UnitLayout>("host_row", "layout", layout),
                             to_int<std::int32_t>("host_row", "num_members", num_members));
      },
      arg("layout"), arg("num_members"),
      nb::sig("def host_row(layout: UnitLayout, num_members: int) -> HostRowLayout"),
      "Packs `num_members` member layers of one layout into a host unit row.");
}

void make_group(SelectionGroupConfig* self, nb::handle layers, nb::handle top_k, nb::handle layout,
                nb::handle roles) {
  constexpr const char* kFunction = "SelectionGroupConfig";
  SelectionGroupConfig group{to_int32s(kFunction, "layers", layers),
                             to_int<std::int32_t>(kFunction, "top_k", top_k),
                             to_instance<UnitLayout>(kFunction, "layout", layout),
                             {}};
  for (const nb::object& role : to_items(kFunction, "roles", roles, "str")) {
    group.roles.push_back(to_text(kFunction, "roles", role));
  }
  new (self) SelectionGroupConfig(std::move(group));
}

void bind_group(nb::module_& m) {
  nb::class_<SelectionGroupConfig>(m, "SelectionGroupConfig",
                                   R"(The layers that use one selection. Immutable.

Parameters
----------
layers : sequence of int
    Member layers, the leader (which owns the indexer) first. A layer is in one group only.
top_k : int
    Widest selection, in [1, cached_slots of the manager].
layout : UnitLayout
    Bytes of a unit in each member layer.
roles : sequence of str
    What the manager's storage calls each region of it. None: one buffer of all, ``"KEY"``.)")
      .def("__init__", &make_group, arg("layers"), arg("top_k"), arg("layout"),
           arg("roles") = nb::tuple(),
           nb::sig("def __init__(self, layers: collections.abc.Sequence[int], top_k: int, "
                   "layout: UnitLayout, roles: collections.abc.Sequence[str] = ()) -> None"))
      .def_ro("layers", &SelectionGroupConfig::layers, nb::rv_policy::copy,
              "Member layers, leader first.")
      .def_ro("top_k", &SelectionGroupConfig::top_k, "Widest selection.")
      .def_ro("layout", &SelectionGroupConfig::layout, nb::rv_policy::copy,
              "Bytes of a unit in each member layer.")
      .def_ro("roles", &SelectionGroupConfig::roles, nb::rv_policy::copy, "Of regions, or none.");
}

// What a manager of sparse layers alone does not need.
void add_dense(KvCacheManagerConfig& config, nb::handle dense_layers, nb::handle gpu_quota,
               nb::handle cold_quota, nb::handle max_util, nb::handle constraints,
               nb::handle typical_step, nb::handle ratio, nb::handle scratch,
               nb::handle enable_stats) {
  constexpr const char* kFunction = "KvCacheManagerConfig";
  config.dense_layers = to_instances<LayerConfig>(kFunction, "dense_layers", dense_layers);
  config.gpu_quota = to_int<std::int64_t>(kFunction, "gpu_quota", gpu_quota);
  config.cold_quota = to_int<std::int64_t>(kFunction, "cold_quota", cold_quota);
  config.max_util_for_resume = to_double(kFunction, "max_util_for_resume", max_util);
  config.constraints = to_instances<BatchDesc>(kFunction, "constraints", constraints);
  config.typical_step = to_optional(typical_step, [&](nb::handle v) -> BatchDesc {
    return to_instance<BatchDesc>(kFunction, "typical_step", v);
  });
  config.initial_pool_ratio = to_doubles(kFunction, "initial_pool_ratio", ratio);
  config.swa_scratch_reuse = to_optional(scratch, [&](nb::handle v) -> SwaScratchReuseConfig {
    return to_instance<SwaScratchReuseConfig>(kFunction, "swa_scratch_reuse", v);
  });
  config.enable_stats = to_bool(kFunction, "enable_stats", enable_stats);
}

void make_config(KvCacheManagerConfig* self, nb::handle groups, nb::handle cached_slots,
                 nb::handle window_slots, nb::handle arena_pages, nb::handle host_pages,
                 nb::handle max_leases, nb::handle max_new_units, nb::handle tokens_per_block,
                 nb::handle tokens_per_unit, nb::handle dense_layers, nb::handle gpu_quota,
                 nb::handle cold_quota, nb::handle max_util, nb::handle constraints,
                 nb::handle typical_step, nb::handle ratio, nb::handle scratch,
                 nb::handle enable_stats, nb::handle device) {
  constexpr const char* kFunction = "KvCacheManagerConfig";
  KvCacheManagerConfig config;
  for (const nb::object& group : to_items(kFunction, "groups", groups, "SelectionGroupConfig")) {
    config.groups.push_back(to_instance<SelectionGroupConfig>(
        kFunction, item_name("groups", config.groups.size()), group));
  }
  config.cached_slots = to_int<std::int32_t>(kFunction, "cached_slots", cached_slots);
  config.window_slots = to_int<std::int32_t>(kFunction, "window_slots", window_slots);
  config.arena_pages = to_int<std::int64_t>(kFunction, "arena_pages", arena_pages);
  config.host_pages = to_int<std::int64_t>(kFunction, "host_pages", host_pages);
  config.max_leases = to_int<std::int32_t>(kFunction, "max_leases", max_leases);
  config.max_new_units = to_int<std::int32_t>(kFunction, "max_new_units", max_new_units);
  config.tokens_per_block = to_int<std::int32_t>(kFunction, "tokens_per_block", tokens_per_block);
  config.tokens_per_unit = to_int<std::int32_t>(kFunction, "tokens_per_unit", tokens_per_unit);
  config.device = parse_device(to_text(kFunction, "device", device));
  add_dense(config, dense_layers, gpu_quota, cold_quota, max_util, constraints, typical_step, ratio,
            scratch, enable_stats);
  check(config);
  new (self) KvCacheManagerConfig(std::move(config));
}

constexpr const char* kConfigDoc =
    R"(What a KvCacheManager stores and how much memory it gets. Immutable.

A page has ``tokens_per_block // tokens_per_unit`` units. Slots and pages are counted in units of
that size, for all member layers alike.

Parameters
----------
groups : sequence of SelectionGroupConfig
    No layer in two of them. None for a resident manager, whose layers are all dense and stay on
    the GPU: then what counts slots, pages and leases is 0, and `dense_layers` has all layers.
cached_slots : int
    Slots of a lease that resolve manages (N): a multiple of a page, at least every ``top_k``, at
    most 65,535.
window_slots : int
    Slots of a lease for the newest units (W): a multiple of a page, at least one page.
arena_pages : int
    Arena pages per member layer for all leases together.
host_pages : int
    Host history pages per selection group.
max_leases : int
    Most leases at a time.
max_new_units : int
    Most units that a row may grow by in one step, in [1, window_slots]; without groups any >= 1.
tokens_per_block : int
    Page size in tokens.
tokens_per_unit : int
    Tokens that one unit stands for; divides ``tokens_per_block``.
dense_layers : sequence of LayerConfig
    Layers whose pages stay on the GPU: indexer keys, windows, compressor states.
gpu_quota : int
    Bytes of their pools; with dense layers at least 1. Raised to what one request needs.
cold_quota : int
    Pinned host bytes for their pages while a request is suspended. Raised likewise.
max_util_for_resume, constraints, typical_step, initial_pool_ratio, swa_scratch_reuse, enable_stats
    As in `StorageConfig`.
device : str
    ``"cpu"``, ``"cuda"`` or ``"cuda:<index>"``.

Raises
------
InvalidArgument
    Names the first field that is wrong, its limits and its value.)";

void bind_manager_config(nb::module_& m) {
  using Config = KvCacheManagerConfig;
  nb::class_<Config> config(m, "KvCacheManagerConfig", kConfigDoc);
  config
      .def("__init__", &make_config, nb::kw_only(), arg("groups") = nb::tuple(),
           arg("cached_slots") = 0, arg("window_slots") = 0, arg("arena_pages") = 0,
           arg("host_pages") = 0, arg("max_leases") = 0, arg("max_new_units") = 1,
           arg("tokens_per_block") = 64, arg("tokens_per_unit") = 1,
           arg("dense_layers") = nb::tuple(), arg("gpu_quota") = 0, arg("cold_quota") = 0,
           arg("max_util_for_resume") = 0.97, arg("constraints") = nb::tuple(),
           arg("typical_step") = nb::none(), arg("initial_pool_ratio") = nb::tuple(),
           arg("swa_scratch_reuse") = nb::none(), arg("enable_stats") = true, arg("device") = "cpu",
           nb::sig("def __init__(self, *, "
                   "groups: collections.abc.Sequence[SelectionGroupConfig] = (), "
                   "cached_slots: int = 0, window_slots: int = 0, arena_pages: int = 0, "
                   "host_pages: int = 0, max_leases: int = 0, max_new_units: int = 1, "
                   "tokens_per_block: int = 64, "
                   "tokens_per_unit: int = 1, "
                   "dense_layers: collections.abc.Sequence[LayerConfig] = (), "
                   "gpu_quota: int = 0, cold_quota: int = 0, max_util_for_resume: float = 0.97, "
                   "constraints: collections.abc.Sequence[BatchDesc] = (), "
                   "typical_step: BatchDesc | None = None, "
                   "initial_pool_ratio: collections.abc.Sequence[float] = (), "
                   "swa_scratch_reuse: SwaScratchReuseConfig | None = None, "
                   "enable_stats: bool = True, device: str = 'cpu') -> None"))
      .def_ro("groups", &Config::groups, nb::rv_policy::copy, "Selection groups.")
      .def_ro("cached_slots", &Config::cached_slots, "N, in slots.")
      .def_ro("window_slots", &Config::window_slots, "W, in slots.")
      .def_ro("arena_pages", &Config::arena_pages, "Arena pages per member layer.")
      .def_ro("host_pages", &Config::host_pages, "Host history pages per selection group.")
      .def_ro("max_leases", &Config::max_leases, "Most leases at a time.")
      .def_ro("max_new_units", &Config::max_new_units, "Most units of growth per row and step.")
      .def_ro("dense_layers", &Config::dense_layers, "Layers whose pages stay on the GPU.")
      .def_ro("gpu_quota", &Config::gpu_quota, "Bytes of their pools.")
      .def_ro("cold_quota", &Config::cold_quota, "Host bytes for their pages while suspended.")
      .def_ro("max_util_for_resume", &Config::max_util_for_resume, "In [0.001, 1].")
      .def_ro("constraints", &Config::constraints, "Batches that must fit.")
      .def_ro("typical_step", &Config::typical_step, "What pools are balanced for, or None.")
      .def_ro("initial_pool_ratio", &Config::initial_pool_ratio, "Weights, or none.")
      .def_ro("swa_scratch_reuse", &Config::swa_scratch_reuse, "Or None.")
      .def_ro("enable_stats", &Config::enable_stats, "Whether pages are counted.")
      .def_prop_ro("units_per_page", &Config::units_per_page, "Page size in units.");
  bind_common_fields(config);
}

}  // namespace

void bind_device(nb::module_& m) {
  m.def("cuda_is_available", &cuda_is_available,
        "True if this build has the CUDA backend and the machine a driver with a GPU.");
  m.def("cuda_unavailable_reason", &cuda_unavailable_reason,
        "Why cuda_is_available() is False, as a sentence; empty if it is True.");
}

// So that Python repeats none of them.
void bind_limits(nb::module_& m) {
  m.attr("MAX_UNITS") = kMaxUnits;
  m.attr("MAX_CACHED_SLOTS") = kMaxCachedSlots;
  m.attr("MAX_ROWS") = kMaxRows;
  m.attr("MAX_PAGE_TOKENS") = kMaxPageTokens;
  m.attr("MAX_HOST_PAGES") = kMaxHostPages;
  m.attr("MAX_ARENA_SLOTS") = kMaxArenaSlots;
  m.attr("MAX_TIER_BYTES") = kMaxTierBytes;
  m.attr("LEAST_UTIL_FOR_RESUME") = kLeastUtilForResume;
}

void bind_config(nb::module_& m) {
  bind_limits(m);
  bind_layout(m);
  bind_host_row(m);
  bind_group(m);
  bind_manager_config(m);
}

}  // namespace sparse_kvcm::bindings
