"""One of several ranks in real processes: runs a scenario, writes what came of it as JSON.

python rank_process.py RANK WORLD STORE SCENARIO
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from sizing_cases import GIB, MIB, tiny_dsa, worker_config
from sparse_kvcm.planner import Budgets, resolve_auto
from sparse_kvcm.sizing import (
    HostMemory,
    Machine,
    TorchRanks,
    allocate,
    measure,
    on_every_rank,
    size_worker,
)


def size(rank: int, ranks: TorchRanks, budget: int, host: int, batch: int = 4) -> dict[str, Any]:
    """Unequal machines: all get what the poorest has."""
    del rank
    machine = Machine(budget, host=HostMemory({"MemAvailable": host}))
    config = worker_config(batch, 5000, {"gpu_cache_factor": 2})
    sizing = size_worker(config, tiny_dsa(), machine, ranks)
    assert sizing.host is not None
    allocation = allocate(sizing, ranks)
    return {
        "tokens": sizing.device.pool_quota,
        "pages": sizing.host.pages,
        "batch": sizing.capacity.batch,
        "device": sizing.device.total_bytes,
        "measured": measure(allocation)["pools"] == sizing.device.pool_bytes,
    }


def agree(rank: int, ranks: TorchRanks) -> dict[str, Any]:
    """Rank 0 has the least device memory, in smaller granules than the others."""
    return size(rank, ranks, (1536 + 1024 * rank) * MIB, (2 - rank % 2) * GIB, batch=1000)


def refuse_one(rank: int, ranks: TorchRanks) -> dict[str, Any]:
    """The last rank has no host memory."""
    return size(rank, ranks, 64 * MIB, 1000 if rank == 1 else GIB)


def raise_before_the_collective(rank: int, ranks: TorchRanks) -> dict[str, Any]:
    def work() -> None:
        if rank == 0:
            raise OSError("disk on fire")

    on_every_rank(ranks, work)
    return {}


def choose_a_factor(rank: int, ranks: TorchRanks) -> dict[str, Any]:
    config = worker_config(3, 5000, {"gpu_cache_factor": "auto"})
    budgets = Budgets(64 * MIB, link_gb_s=1000.0 if rank else 1e-5)
    fixed = resolve_auto(config, tiny_dsa(), budgets, ranks=ranks)
    alone = resolve_auto(config, tiny_dsa(), budgets)

    def factor(config: Any) -> float:
        return float(config.sparse_attention_config.kv_cache_offload_config.gpu_cache_factor)

    return {"agreed": factor(fixed), "alone": factor(alone)}


def die(rank: int, ranks: TorchRanks) -> dict[str, Any]:
    if rank == 1:
        os._exit(7)
    return agree(rank, ranks)


SCENARIOS = {
    "all": [agree, refuse_one, raise_before_the_collective, choose_a_factor, agree],
    "die": [die],
}


def main() -> None:
    rank, world, store, name = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=60),
    )
    ranks = TorchRanks()
    results = []
    for scenario in SCENARIOS[name]:
        try:
            results.append(scenario(rank, ranks))
        except Exception as error:
            results.append({"error": type(error).__name__, "message": str(error)})
    print(json.dumps(results), flush=True)
    if name == "all":
        dist.barrier()  # whoever left first would break the connections of the others
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
