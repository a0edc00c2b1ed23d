"""From a model and a worker's configuration to its cache manager: what an engine calls.

Which version of a manager that is, `sparse_kvcm.dsa.choice` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparse_kvcm._core import InvalidArgument
from sparse_kvcm.base_manager import size_checked
from sparse_kvcm.config import WorkerConfig
from sparse_kvcm.dsa import (
    V2_ARCHITECTURES,
    DsaCacheConfig,
    DSACacheManager,
    DSACacheManagerV2,
    ManagerFeatures,
    OffloadSizes,
    choose_version,
)
from sparse_kvcm.models import DsaGeometry, ModelGeometry, geometry_of, load_geometry
from sparse_kvcm.sizing import Machine, Ranks, SingleRank, WorkerSizing, on_every_rank

FUNCTION = "create_dsa_manager"
Model = str | Path | Mapping[str, Any] | DsaGeometry


def create_dsa_manager(
    model: Model, config: WorkerConfig, machine: Machine, ranks: Ranks | None = None
) -> DSACacheManager | DSACacheManagerV2:
    """Make the DSA cache manager of a worker, with the memory that its configuration sizes.

    A collective call, as `BaseKvCacheManager` is: gates first, then sizes, then memory, and what
    fails on one rank fails on all.

    Parameters
    ----------
    model : str, Path, mapping or DsaGeometry
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
    ranks = SingleRank() if ranks is None else ranks
    features = _features(config)

    def choose() -> tuple[DsaGeometry, int]:
        _check_batches(config)
        choice = config.kv_cache_config.use_kv_cache_manager_v2
        return _geometry(model), choose_version(choice, _architecture(model), features)

    geometry, version = on_every_rank(ranks, choose)
    config, sizing = size_checked(config, geometry, machine, ranks)
    sized = dsa_config(config, geometry, sizing)
    kind = DSACacheManagerV2 if version == 2 else DSACacheManager
    return on_every_rank(ranks, lambda: kind(sized, features))


def dsa_config(config: WorkerConfig, geometry: DsaGeometry, sizing: WorkerSizing) -> DsaCacheConfig:
    """What a DSA manager with these sizes is made from."""
    workload, storage = sizing.device.workload, sizing.device.storage
    if storage is None:
        raise InvalidArgument(f"[{FUNCTION}] sizing must have pools; it did not fit")
    batch, page = sizing.device.batch, workload.units_per_page
    cold_quota, offload = config.kv_cache_config.host_cache_size or 0, None
    if sizing.host is not None:
        offload = OffloadSizes(
            workload.cached_slots,
            sizing.host.pages,
            window_slots=workload.window_slots,
            arena_pages=batch * workload.lease_pages,
            cold_quota=cold_quota,
        )
    return DsaCacheConfig(
        geometry,
        max_batch_size=batch,
        max_seq_len=workload.max_seq_len,
        gpu_quota=storage.cache_tiers[0].quota,
        kv_dtype=workload.kv_dtype,
        index_dtype=workload.index_dtype,
        tokens_per_block=page,
        max_util_for_resume=workload.max_util_for_resume,
        cold_quota=0 if offload else cold_quota,
        device=workload.device,
        offload=offload,
    )


def _features(config: WorkerConfig) -> ManagerFeatures:
    parallel = config.context_parallel
    return ManagerFeatures(
        has_connector=config.kv_cache_config.managed_by_another,
        beam_width=config.max_beam_width,
        context_parallel=parallel.kind if parallel.size > 1 else "none",
        offloads=config.offloads,
    )


def _check_batches(config: WorkerConfig) -> None:
    if config.num_batches != 1:
        raise InvalidArgument(
            f"[{FUNCTION}] num_batches must be 1: a DSA manager has one step open at a time, "
            f"got {config.num_batches}"
        )


def _geometry(model: Model) -> DsaGeometry:
    geometry: ModelGeometry
    if isinstance(model, ModelGeometry):
        geometry = model
    elif isinstance(model, Mapping):
        geometry = geometry_of(model)
    else:
        geometry = load_geometry(model)
    if not isinstance(geometry, DsaGeometry):
        raise InvalidArgument(
            f"[{FUNCTION}] model must be a DSA model, got {geometry.name}, whose algorithm is "
            f"{geometry.algorithm}"
        )
    return geometry


def _architecture(model: Model) -> str:
    """As the model says; one that names none has a DSA geometry, which is enough."""
    names = model.get("architectures") if isinstance(model, Mapping) else None
    return str(names[0]) if names else V2_ARCHITECTURES[0]
