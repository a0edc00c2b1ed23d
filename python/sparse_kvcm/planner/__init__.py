"""How many requests a decode worker will hold, resident and offloading, and how fast."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparse_kvcm.models import ModelGeometry
from sparse_kvcm.planner.locality import LOCALITIES, Locality, find_locality
from sparse_kvcm.planner.plan import (
    FACTOR_GRID,
    Budgets,
    FactorPoint,
    OffloadSide,
    Plan,
    Side,
    lease_bytes,
    make_plan,
    recommend_factor,
    sweep_factors,
)
from sparse_kvcm.sizing.ranks import Ranks, SingleRank, on_every_rank
from sparse_kvcm.sizing.worker import Machine, workload_of

if TYPE_CHECKING:
    from sparse_kvcm.config import WorkerConfig

__all__ = [
    "LOCALITIES",
    "Budgets",
    "FactorPoint",
    "Locality",
    "OffloadSide",
    "Plan",
    "Side",
    "find_locality",
    "lease_bytes",
    "make_plan",
    "recommend_factor",
    "resolve_auto",
    "sweep_factors",
]


def resolve_auto(
    config: WorkerConfig,
    geometry: ModelGeometry,
    machine: Machine,
    locality: str | None = None,
    ranks: Ranks | None = None,
) -> WorkerConfig:
    """Replace ``gpu_cache_factor: auto`` by the planner's choice; return others as they are.

    A collective call where it is ``auto``: all ranks take the least of their choices.

    Parameters
    ----------
    config : WorkerConfig
    geometry : ModelGeometry
    machine : Machine
    locality : str, optional
        The curve to go by; without it the one nearest to the model.
    ranks : Ranks, optional
    """
    offload = config.sparse_attention_config.kv_cache_offload_config
    if offload.gpu_cache_factor != "auto":
        return config

    def with_factor(factor: float) -> WorkerConfig:
        fixed = offload.model_copy(update={"gpu_cache_factor": factor})
        attention = config.sparse_attention_config.model_copy(
            update={"kv_cache_offload_config": fixed}
        )
        return config.model_copy(update={"sparse_attention_config": attention})

    def choose() -> float:
        workload = workload_of(with_factor(FACTOR_GRID[0]), geometry, machine.device)
        budgets = Budgets(
            machine.budget(config),
            offload.host_history_size or machine.host_memory(config).automatic,
            machine.link_gb_s,
            max_batch_size=config.kv_cache_config.max_batch_size,
        )
        return recommend_factor(workload, budgets, find_locality(locality, geometry.name))

    ranks = SingleRank() if ranks is None else ranks
    halves = ranks.minimum([int(2 * on_every_rank(ranks, choose))])
    return with_factor(halves[0] / 2)
