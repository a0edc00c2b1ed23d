// The configuration of Storage: tiers, layers, buffers, batches.
#include "sparse_kvcm/storage_config.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <new>
#include <optional>
#include <utility>

#include "args.hpp"
#include "bindings.hpp"
#include "common_fields.hpp"
#include "record.hpp"
#include "sparse_kvcm/config.hpp"
#include "sparse_kvcm/device.hpp"

namespace sparse_kvcm::bindings {
namespace {

std::optional<std::int32_t> to_optional_int(const char* function, std::string_view name,
                                            nb::handle value) {
  return to_optional(value, [&](nb::handle v) { return to_int<std::int32_t>(function, name, v); });
}

void make_tier(CacheTierConfig* self, nb::handle tier, nb::handle quota, nb::handle max_quota) {
  constexpr const char* kFunction = "CacheTierConfig";
  new (self) CacheTierConfig{to_enum<CacheTier>(kFunction, "tier", tier),
                             to_int<std::int64_t>(kFunction, "quota", quota),
                             to_int<std::int64_t>(kFunction, "max_quota", max_quota)};
}

void bind_tier(nb::module_& m) {
  nb::enum_<CacheTier>(m, "CacheTier", "Where a tier's bytes lie.")
      .value("GPU_MEM", CacheTier::kGpuMem, "memory of the config's device")
      .value("HOST_MEM", CacheTier::kHostMem, "pinned host memory");
  Record<CacheTierConfig>(m, "CacheTierConfig", R"(One tier of memory. Immutable.

Parameters
----------
tier : CacheTier
    GPU_MEM at level 0, HOST_MEM at level 1.
quota : int
    Bytes, at least 1. Raised to what the pools need at least, then to whole granules.
max_quota : int
    The most that `Storage.resize` can ever set: addresses are reserved for it, not memory.
    0 stands for what the quota becomes.)")
      .init(&make_tier, arg("tier"), arg("quota"), arg("max_quota") = 0,
            nb::sig("def __init__(self, tier: CacheTier, quota: int, max_quota: int = 0) -> None"))
      .field("tier", &CacheTierConfig::tier, "Where the bytes lie.")
      .field("quota", &CacheTierConfig::quota, "Bytes.")
      .field("max_quota", &CacheTierConfig::max_quota, "Most bytes ever; 0 = the quota.")
      .done();
}

void make_buffer(BufferConfig* self, nb::handle role, nb::handle page_bytes, nb::handle tokens,
                 nb::handle is_sparse) {
  constexpr const char* kFunction = "BufferConfig";
  new (self) BufferConfig{to_text(kFunction, "role", role),
                          to_int<std::int64_t>(kFunction, "page_bytes", page_bytes),
                          to_optional_int(kFunction, "tokens_per_block_override", tokens),
                          to_bool(kFunction, "is_sparse", is_sparse)};
}

void make_layer(LayerConfig* self, nb::handle layer_id, nb::handle buffers, nb::handle window,
                nb::handle sinks) {
  constexpr const char* kFunction = "LayerConfig";
  new (self) LayerConfig{to_int<std::int32_t>(kFunction, "layer_id", layer_id),
                         to_instances<BufferConfig>(kFunction, "buffers", buffers),
                         to_optional_int(kFunction, "sliding_window_size", window),
                         to_optional_int(kFunction, "num_sink_tokens", sinks)};
}

void bind_layer(nb::module_& m) {
  Record<BufferConfig>(m, "BufferConfig", R"(The bytes that a layer keeps per page in one role.

Parameters
----------
role : str
    Unique within the layer, such as ``"KEY"``.
page_bytes : int
    Of one page as kernels see it.
tokens_per_block_override : int, optional
    Tokens of a page as kernels see it, if not ``tokens_per_block``; divides it.
is_sparse : bool
    Its history is on the host. All buffers of a layer alike.)")
      .init(&make_buffer, arg("role"), arg("page_bytes"),
            arg("tokens_per_block_override") = nb::none(), arg("is_sparse") = false,
            nb::sig("def __init__(self, role: str, page_bytes: int, "
                    "tokens_per_block_override: int | None = None, is_sparse: bool = False) "
                    "-> None"))
      .field("role", &BufferConfig::role, "Its name within the layer.")
      .field("page_bytes", &BufferConfig::page_bytes, "Of one page as kernels see it.")
      .field("tokens_per_block_override", &BufferConfig::tokens_per_block_override,
             "Tokens of a page as kernels see it; None = tokens_per_block.")
      .field("is_sparse", &BufferConfig::is_sparse, "Its history is on the host.")
      .done();
  Record<LayerConfig>(m, "LayerConfig", R"(What one layer keeps, and for how long. Immutable.

Parameters
----------
layer_id : int
    Unique, at least 0.
buffers : sequence of BufferConfig
    At least one, with different roles.
sliding_window_size : int, optional
    The newest tokens that the layer reads, the query's own among them. None: it reads all.
num_sink_tokens : int, optional
    First tokens that it reads beside the window.)")
      .init(&make_layer, arg("layer_id"), arg("buffers"), arg("sliding_window_size") = nb::none(),
            arg("num_sink_tokens") = nb::none(),
            nb::sig("def __init__(self, layer_id: int, "
                    "buffers: collections.abc.Sequence[BufferConfig], "
                    "sliding_window_size: int | None = None, num_sink_tokens: int | None = None) "
                    "-> None"))
      .field("layer_id", &LayerConfig::layer_id, "Its id.")
      .field("buffers", &LayerConfig::buffers, "What it keeps.")
      .field("sliding_window_size", &LayerConfig::sliding_window_size, "Tokens, or None.")
      .field("num_sink_tokens", &LayerConfig::num_sink_tokens, "Tokens, or None.")
      .done();
}

void make_request(KvCacheDesc* self, nb::handle capacity, nb::handle history_length) {
  constexpr const char* kFunction = "KvCacheDesc";
  new (self) KvCacheDesc{to_int<std::int32_t>(kFunction, "capacity", capacity),
                         to_int<std::int32_t>(kFunction, "history_length", history_length)};
}

void make_batch(BatchDesc* self, nb::handle kv_caches, nb::handle system_prompt_length) {
  constexpr const char* kFunction = "BatchDesc";
  new (self)
      BatchDesc{to_instances<KvCacheDesc>(kFunction, "kv_caches", kv_caches),
                to_int<std::int32_t>(kFunction, "system_prompt_length", system_prompt_length)};
}

void make_scratch(SwaScratchReuseConfig* self, nb::handle max_rewind_len) {
  new (self) SwaScratchReuseConfig{
      to_int<std::int32_t>("SwaScratchReuseConfig", "max_rewind_len", max_rewind_len)};
}

void bind_batch_desc(nb::module_& m) {
  Record<KvCacheDesc>(m, "KvCacheDesc", R"(One request at a moment.

Parameters
----------
capacity : int
    Tokens that it has room for.
history_length : int
    Tokens of them that are computed.)")
      .init(&make_request, arg("capacity"), arg("history_length"),
            nb::sig("def __init__(self, capacity: int, history_length: int) -> None"))
      .field("capacity", &KvCacheDesc::capacity, "Tokens that it has room for.")
      .field("history_length", &KvCacheDesc::history_length, "Tokens that are computed.")
      .done();
  Record<BatchDesc>(m, "BatchDesc", R"(Requests that are there together; sizes pools.

Parameters
----------
kv_caches : sequence of KvCacheDesc
    At least one.
system_prompt_length : int
    Tokens that all begin with and whose whole pages they share, counted once.)")
      .init(&make_batch, arg("kv_caches"), arg("system_prompt_length") = 0,
            nb::sig("def __init__(self, kv_caches: collections.abc.Sequence[KvCacheDesc], "
                    "system_prompt_length: int = 0) -> None"))
      .field("kv_caches", &BatchDesc::kv_caches, "The requests.")
      .field("system_prompt_length", &BatchDesc::system_prompt_length, "Tokens that they share.")
      .done();
  Record<SwaScratchReuseConfig>(m, "SwaScratchReuseConfig", R"(Lets prefill pages share slots.

Pages that a prefill writes and that are stale when it ends are needed by one layer at a time.

Parameters
----------
max_rewind_len : int
    Tokens that may be taken back after a step.)")
      .init(&make_scratch, arg("max_rewind_len") = 0,
            nb::sig("def __init__(self, max_rewind_len: int = 0) -> None"))
      .field("max_rewind_len", &SwaScratchReuseConfig::max_rewind_len,
             "Tokens that may be taken back.")
      .done();
}

void make_config(StorageConfig* self, nb::handle cache_tiers, nb::handle layers,
                 nb::handle selection_groups, nb::handle tokens_per_block,
                 nb::handle tokens_per_unit, nb::handle max_util, nb::handle constraints,
                 nb::handle typical_step, nb::handle suspended, nb::handle ratio,
                 nb::handle scratch, nb::handle max_host_pages, nb::handle enable_stats,
                 nb::handle device) {
  constexpr const char* kFunction = "StorageConfig";
  StorageConfig config;
  config.device = parse_device(to_text(kFunction, "device", device));
  config.tokens_per_block = to_int<std::int32_t>(kFunction, "tokens_per_block", tokens_per_block);
  config.tokens_per_unit = to_int<std::int32_t>(kFunction, "tokens_per_unit", tokens_per_unit);
  config.cache_tiers = to_instances<CacheTierConfig>(kFunction, "cache_tiers", cache_tiers);
  config.layers = to_instances<LayerConfig>(kFunction, "layers", layers);
  config.selection_groups =
      to_instances<SelectionGroupConfig>(kFunction, "selection_groups", selection_groups);
  config.max_util_for_resume = to_double(kFunction, "max_util_for_resume", max_util);
  config.constraints = to_instances<BatchDesc>(kFunction, "constraints", constraints);
  config.typical_step = to_optional(typical_step, [&](nb::handle v) -> BatchDesc {
    return to_instance<BatchDesc>(kFunction, "typical_step", v);
  });
  config.suspended = to_optional(suspended, [&](nb::handle v) -> BatchDesc {
    return to_instance<BatchDesc>(kFunction, "suspended", v);
  });
  config.initial_pool_ratio = to_doubles(kFunction, "initial_pool_ratio", ratio);
  config.swa_scratch_reuse = to_optional(scratch, [&](nb::handle v) -> SwaScratchReuseConfig {
    return to_instance<SwaScratchReuseConfig>(kFunction, "swa_scratch_reuse", v);
  });
  config.max_host_pages = to_optional(max_host_pages, [&](nb::handle v) {
    return to_int<std::int32_t>(kFunction, "max_host_pages", v);
  });
  config.enable_stats = to_bool(kFunction, "enable_stats", enable_stats);
  check(config);
  new (self) StorageConfig(std::move(config));
}

constexpr const char* kConfigDoc =
    R"(Which bytes each layer keeps per page, for how long, and where. Immutable.

Parameters
----------
cache_tiers : sequence of CacheTierConfig
    GPU_MEM, then HOST_MEM if there are sparse layers or requests are to be suspended.
layers : sequence of LayerConfig
    At least one.
selection_groups : sequence of SelectionGroupConfig
    Every sparse layer in one of them; its buffers are the regions of the group's layout.
tokens_per_block : int
    Page size in tokens.
tokens_per_unit : int
    Tokens that one unit of a sparse layer stands for; divides ``tokens_per_block``.
max_util_for_resume : float
    The most of a pool group's slots that a request which resumes may bring it to, in [0.001, 1].
constraints : sequence of BatchDesc
    Batches that must fit, whatever the ratio.
typical_step : BatchDesc, optional
    The batch that pool sizes are balanced for.
suspended : BatchDesc, optional
    Requests that are suspended beside the typical step: the host tier keeps room for their pages,
    and the rest for history. None: one, the longest that pools are balanced for.
initial_pool_ratio : sequence of float
    One weight per pool group that is not a cold one, sum 1. On the GPU it comes before
    ``typical_step``.
swa_scratch_reuse : SwaScratchReuseConfig, optional
    Lets pages of a prefill share slots.
max_host_pages : int, optional
    Most pages of host history, where the host tier's quota holds more.
enable_stats : bool
    Count what `Storage.get_and_reset_statistics` reports.
device : str
    ``"cpu"``, ``"cuda"`` or ``"cuda:<index>"``.

Raises
------
InvalidArgument
    Names the first field that is wrong, its limits and its value.)";

void bind_config_class(nb::module_& m) {
  using Config = StorageConfig;
  nb::class_<Config> config(m, "StorageConfig", kConfigDoc);
  config
      .def("__init__", &make_config, nb::kw_only(), arg("cache_tiers"), arg("layers"),
           arg("selection_groups") = nb::tuple(), arg("tokens_per_block") = 64,
           arg("tokens_per_unit") = 1, arg("max_util_for_resume") = 0.97,
           arg("constraints") = nb::tuple(), arg("typical_step") = nb::none(),
           arg("suspended") = nb::none(), arg("initial_pool_ratio") = nb::tuple(),
           arg("swa_scratch_reuse") = nb::none(), arg("max_host_pages") = nb::none(),
           arg("enable_stats") = true, arg("device") = "cpu",
           nb::sig("def __init__(self, *, cache_tiers: collections.abc.Sequence[CacheTierConfig], "
                   "layers: collections.abc.Sequence[LayerConfig], "
                   "selection_groups: collections.abc.Sequence[SelectionGroupConfig] = (), "
                   "tokens_per_block: int = 64, tokens_per_unit: int = 1, "
                   "max_util_for_resume: float = 0.97, "
                   "constraints: collections.abc.Sequence[BatchDesc] = (), "
                   "typical_step: BatchDesc | None = None, "
                   "suspended: BatchDesc | None = None, "
                   "initial_pool_ratio: collections.abc.Sequence[float] = (), "
                   "swa_scratch_reuse: SwaScratchReuseConfig | None = None, "
                   "max_host_pages: int | None = None, "
                   "enable_stats: bool = True, device: str = 'cpu') -> None"))
      .def_ro("cache_tiers", &Config::cache_tiers, "Tiers by level.")
      .def_ro("layers", &Config::layers, "Layers.")
      .def_ro("selection_groups", &Config::selection_groups, nb::rv_policy::copy,
              "Selection groups of the sparse layers.")
      .def_ro("max_util_for_resume", &Config::max_util_for_resume, "In [0.001, 1].")
      .def_ro("constraints", &Config::constraints, "Batches that must fit.")
      .def_ro("typical_step", &Config::typical_step, "What pools are balanced for, or None.")
      .def_ro("suspended", &Config::suspended, "Who is suspended meanwhile, or None.")
      .def_ro("initial_pool_ratio", &Config::initial_pool_ratio, "Weights, or none.")
      .def_ro("swa_scratch_reuse", &Config::swa_scratch_reuse, "Or None.")
      .def_ro("max_host_pages", &Config::max_host_pages, "Or None.")
      .def_ro("enable_stats", &Config::enable_stats, "Whether pages are counted.");
  bind_common_fields(config);
}

}  // namespace

void bind_storage_config(nb::module_& m) {
  bind_tier(m);
  bind_layer(m);
  bind_batch_desc(m);
  bind_config_class(m);
  m.def(
      "storage_config",
      [](nb::handle config) {
        return storage_config(
            to_instance<KvCacheManagerConfig>("storage_config", "config", config));
      },
      arg("config"), nb::sig("def storage_config(config: KvCacheManagerConfig) -> StorageConfig"),
      "The storage that a manager of sparse layers has; add dense layers and their quota to it.");
}

}  // namespace sparse_kvcm::bindings
