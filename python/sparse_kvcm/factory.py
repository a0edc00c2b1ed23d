"""From a model and a worker's configuration to its cache manager: what an engine calls.

Both families start alike, in `_start`: what they are, what their managers refuse, gates, sizes.
Which version a DSA model gets, `sparse_kvcm.dsa.choice` says; DeepSeek-V4 has version 2 alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

from sparse_kvcm._core import InvalidArgument
from sparse_kvcm.base_manager import size_checked
from sparse_kvcm.config import WorkerConfig
from sparse_kvcm.deepseek_v4 import DeepseekV4CacheConfig, DeepseekV4CacheManager
from sparse_kvcm.deepseek_v4 import choose_version as choose_v4_version
from sparse_kvcm.dsa import (
    V2_ARCHITECTURES,
    DsaCacheConfig,
    DSACacheManager,
    DSACacheManagerV2,
    ManagerFeatures,
    OffloadSizes,
    choose_version,
)
from sparse_kvcm.models import (
    DeepSeekV4Geometry,
    DsaGeometry,
    ModelGeometry,
    geometry_of,
    load_config,
    load_geometry,
)
from sparse_kvcm.sizing import Machine, Ranks, SingleRank, WorkerSizing, on_every_rank

Model: TypeAlias = str | Path | Mapping[str, Any] | ModelGeometry
Geometry = TypeVar("Geometry", bound=ModelGeometry)
_FAMILIES: dict[type[ModelGeometry], str] = {
    DsaGeometry: "DSA",
    DeepSeekV4Geometry: "DeepSeek-V4",
}


def create_dsa_manager(
    model: Model, config: WorkerConfig, machine: Machine, ranks: Ranks | None = None
) -> DSACacheManager | DSACacheManagerV2:
    """Make the DSA cache manager of a worker, with the memory that its configuration sizes.

    A collective call, as `BaseKvCacheManager` is: gates first, then sizes, then memory, and what
    fails on one rank fails on all.

    Parameters
    ----------
    model : str, Path, mapping or ModelGeometry
        A preset, a ``config.json`` or the folder of one, what it holds, or the geometry itself.
    config : WorkerConfig
        The same on every rank, ``local_ranks`` apart.
    machine : Machine
        What this rank finds.
    ranks : Ranks, optional
        Who decides together; this rank alone without it.

    Raises
    ------
    NotImplementedError
        For what the version does not do, see `sparse_kvcm.dsa.choice`, and for offload without a
        cache transceiver or on a GPU that is too old.
    InvalidArgument
        For a model that is not DSA, and any other configuration that cannot be.
    OtherRankError
        If the failure was another rank's.

    Examples
    --------
    >>> from sparse_kvcm.config import WorkerConfig
    >>> from sparse_kvcm.sizing import Machine
    >>> config = WorkerConfig.from_text('''
    ... sparse_attention_config: {algorithm: dsa}
    ... kv_cache_config: {max_batch_size: 2, max_seq_len: 512, tokens_per_block: 64}
    ... ''')
    >>> model = {"model_type": "deepseek_v32", "architectures": ["DeepseekV32ForCausalLM"],
    ...          "num_hidden_layers": 2, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    ...          "index_topk": 64, "max_position_embeddings": 4096}
    >>> type(create_dsa_manager(model, config, Machine(64_000_000))).__name__
    'DSACacheManagerV2'
    """

    def choose_dsa(features: ManagerFeatures) -> int:
        choice = config.kv_cache_config.use_kv_cache_manager_v2
        return choose_version(choice, _architecture("create_dsa_manager", model), features)

    start = _start("create_dsa_manager", DsaGeometry, model, config, machine, ranks, choose_dsa)
    sized = dsa_config(start.config, start.geometry, start.sizing)
    kind = DSACacheManagerV2 if start.version == 2 else DSACacheManager
    return on_every_rank(start.ranks, lambda: kind(sized, start.features))


def create_deepseek_v4_manager(
    model: Model, config: WorkerConfig, machine: Machine, ranks: Ranks | None = None
) -> DeepseekV4CacheManager:
    """Make the DeepSeek-V4 cache manager of a worker, with the memory that its configuration sizes.

    As `create_dsa_manager`, which see for the parameters. A worker that neither offloads nor is
    ``generation_only`` computes prompts in steps of at most ``max_num_tokens``; others get theirs
    by `import_history`.

    Raises
    ------
    NotImplementedError
        For what the manager does not do, see `sparse_kvcm.deepseek_v4.choice`, and for offload
        without a cache transceiver or on a GPU that is too old.
    InvalidArgument
        For a model that is not a DeepSeek-V4, ``use_kv_cache_manager_v2`` of False, which would
        name a manager that there is not, and any other configuration that cannot be.
    OtherRankError
        If the failure was another rank's.

    Examples
    --------
    >>> from sparse_kvcm.config import WorkerConfig
    >>> from sparse_kvcm.sizing import Machine
    >>> config = WorkerConfig.from_text('''
    ... sparse_attention_config: {algorithm: deepseek_v4, enable_kv_cache_offload: true}
    ... kv_cache_config: {max_batch_size: 2, max_seq_len: 1024}
    ... cache_transceiver_config: {backend: in_process}
    ... generation_only: true
    ... ''')
    >>> model = {"model_type": "deepseek_v4", "num_hidden_layers": 2, "compress_ratios": [4, 128],
    ...          "index_topk": 64, "max_position_embeddings": 4096}
    >>> manager = create_deepseek_v4_manager(model, config, Machine(64_000_000))
    >>> manager.config.offload.cached_slots
    128
    """

    def choose(features: ManagerFeatures) -> int:
        return choose_v4_version(config.kv_cache_config.use_kv_cache_manager_v2, features)

    start = _start(
        "create_deepseek_v4_manager", DeepSeekV4Geometry, model, config, machine, ranks, choose
    )
    sized = deepseek_v4_config(start.config, start.geometry, start.sizing)
    return on_every_rank(start.ranks, lambda: DeepseekV4CacheManager(sized, start.features))


def dsa_config(config: WorkerConfig, geometry: DsaGeometry, sizing: WorkerSizing) -> DsaCacheConfig:
    """What a DSA manager with these sizes is made from."""
    return DsaCacheConfig(geometry, **_cache_fields(config, sizing))


def deepseek_v4_config(
    config: WorkerConfig, geometry: DeepSeekV4Geometry, sizing: WorkerSizing
) -> DeepseekV4CacheConfig:
    """What a DeepSeek-V4 manager with these sizes is made from."""
    workload = sizing.device.workload
    return DeepseekV4CacheConfig(
        geometry,
        **_cache_fields(config, sizing),
        avg_seq_len=workload.avg_seq_len,
        max_num_tokens=workload.max_num_tokens or None,
    )


@dataclass(frozen=True)
class _Start(Generic[Geometry]):
    """A worker that passed its gates and was sized: what its manager is made from."""

    geometry: Geometry
    version: int
    features: ManagerFeatures
    config: WorkerConfig
    sizing: WorkerSizing
    ranks: Ranks


def _start(
    function: str,
    kind: type[Geometry],
    model: Model,
    config: WorkerConfig,
    machine: Machine,
    ranks: Ranks | None,
    choose: Callable[[ManagerFeatures], int],
) -> _Start[Geometry]:
    """Refuse, check gates, and size: in this order, and nothing is allocated yet.

    `choose` resolves ``use_kv_cache_manager_v2`` or refuses what the worker wants.
    """
    ranks = SingleRank() if ranks is None else ranks

    def refuse() -> tuple[Geometry, int, ManagerFeatures]:
        kinds = (("config", config, WorkerConfig), ("machine", machine, Machine))
        for name, value, wanted in kinds:
            if not isinstance(value, wanted):
                raise InvalidArgument(
                    f"[{function}] {name} must be a {wanted.__name__}, got {value!r:.40}"
                )
        if config.num_batches != 1:
            raise InvalidArgument(
                f"[{function}] num_batches must be 1: a manager of this kind has one step open at "
                f"a time, got {config.num_batches}"
            )
        if config.max_draft_len != 0:
            raise InvalidArgument(
                f"[{function}] max_draft_len must be 0: tokens that a step has added stay, and "
                f"speculative decoding would take some back, got {config.max_draft_len}"
            )
        features = _features(config)
        return _geometry(function, kind, model), choose(features), features

    geometry, version, features = on_every_rank(ranks, refuse)
    config, sizing = size_checked(config, geometry, machine, ranks)
    return _Start(geometry, version, features, config, sizing, ranks)


def _cache_fields(config: WorkerConfig, sizing: WorkerSizing) -> dict[str, Any]:
    """What the configurations of both families have in common."""
    workload, storage = sizing.device.workload, sizing.device.storage
    if storage is None:
        raise InvalidArgument("[factory] sizing must have pools; it did not fit")
    batch, offload = sizing.device.batch, None
    if sizing.host is not None:
        offload = OffloadSizes(
            workload.cached_slots,
            sizing.host.pages,
            window_slots=workload.window_slots,
            arena_pages=batch * workload.lease_pages,
            cold_quota=config.kv_cache_config.host_cache_size or 0,
        )
    return {
        "max_batch_size": batch,
        "max_seq_len": workload.max_seq_len,
        "gpu_quota": storage.cache_tiers[0].quota,
        "kv_dtype": workload.kv_dtype,
        "index_dtype": workload.index_dtype,
        "tokens_per_block": workload.tokens_per_block,
        "max_util_for_resume": workload.max_util_for_resume,
        "cold_quota": 0 if offload else config.kv_cache_config.host_cache_size or 0,
        "device": workload.device,
        "offload": offload,
    }


def _features(config: WorkerConfig) -> ManagerFeatures:
    parallel = config.context_parallel
    return ManagerFeatures(
        has_connector=config.kv_cache_config.managed_by_another,
        beam_width=config.max_beam_width,
        context_parallel=parallel.kind if parallel.size > 1 else "none",
        offloads=config.offloads,
    )


def _geometry(function: str, kind: type[Geometry], model: Model) -> Geometry:
    geometry: ModelGeometry
    if isinstance(model, ModelGeometry):
        geometry = model
    elif isinstance(model, Mapping):
        geometry = geometry_of(model)
    else:
        geometry = load_geometry(model)
    if not isinstance(geometry, kind):
        raise InvalidArgument(
            f"[{function}] model must be a {_FAMILIES[kind]} model, got {geometry.name}, whose "
            f"algorithm is {geometry.algorithm}"
        )
    return geometry


def _architecture(function: str, model: Model) -> str:
    """As the model says; one that names none has a DSA geometry, which is enough."""
    if isinstance(model, ModelGeometry):
        return V2_ARCHITECTURES[0]
    config = model if isinstance(model, Mapping) else load_config(model)[1]
    names = config.get("architectures") or [V2_ARCHITECTURES[0]]
    if not isinstance(names, list) or not isinstance(names[0], str):
        raise InvalidArgument(f"[{function}] architectures must be a list of names, got {names!r}")
    return names[0]
