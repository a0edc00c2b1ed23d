"""One of several ranks in real processes: runs a scenario, writes what came of it as JSON.

python rank_process.py BACKEND RANK WORLD STORE SCENARIO
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from sizing_cases import GIB, MIB, PLENTY, available, tiny_dsa, worker_config
from sparse_kvcm.base_manager import BaseKvCacheManager
from sparse_kvcm.planner import resolve_auto
from sparse_kvcm.sizing import Machine, TorchRanks, measure, on_every_rank


def start(
    ranks: TorchRanks, machine: Machine, batch: int = 4, factor: float | str = 2
) -> BaseKvCacheManager:
    config = worker_config(batch, 5000, {"gpu_cache_factor": factor})
    return BaseKvCacheManager(config, tiny_dsa(), machine, ranks)


def small_machine(**changes: Any) -> Machine:
    return Machine(**({"device_budget": 64 * MIB, "host": PLENTY} | changes))


def agree(rank: int, ranks: TorchRanks) -> dict[str, Any]:
    """Rank 0 has the least device memory, in smaller granules, and rank 1 the least of the host."""
    host = available((2 - rank % 2) * GIB)
    worker = start(ranks, Machine((1536 + 1024 * rank) * MIB, host=host), batch=1000)
    sizing = worker.sizing
    assert sizing.host is not None
    return {
        "quota": sizing.device.pool_quota,
        "pages": sizing.host.pages,
        "batch": sizing.capacity.batch,
        "device": sizing.device.total_bytes,
        "measured": measure(worker.allocation)["pools"] == sizing.device.pool_bytes,
    }


def refuse_one(rank: int, ranks: TorchRanks) -> dict[str, Any]:
    """Rank 1 has no host memory."""
    memory = available(1000 if rank == 1 else GIB)
    start(ranks, small_machine(host=memory))
    return {}


def old_gpu(rank: int, ranks: TorchRanks) -> dict[str, Any]:
    """A gate closes on rank 1 alone."""
    start(ranks, small_machine(compute_capability=(7, 5) if rank == 1 else (9, 0)))
    return {}


def differ(rank: int, ranks: TorchRanks) -> dict[str, Any]:
    """Rank 1 would make one collective call more."""
    start(ranks, small_machine(), factor="auto" if rank == 1 else 2)
    return {}


def raise_before_the_collective(rank: int, ranks: TorchRanks) -> dict[str, Any]:
    def work() -> None:
        if rank == 0:
            raise OSError("disk on fire")

    on_every_rank(ranks, work)
    return {}


def choose_a_factor(rank: int, ranks: TorchRanks) -> dict[str, Any]:
    config = worker_config(50, 5000, {"gpu_cache_factor": "auto"})
    machine = small_machine(link_gb_s=1000.0 if rank else 1e-5)
    fixed = resolve_auto(config, tiny_dsa(), machine, ranks=ranks)
    alone = resolve_auto(config, tiny_dsa(), machine)

    def factor(config: Any) -> float:
        return float(config.sparse_attention_config.kv_cache_offload_config.gpu_cache_factor)

    return {"agreed": factor(fixed), "alone": factor(alone)}


def die(rank: int, ranks: TorchRanks) -> dict[str, Any]:
    if rank == 1:
        os._exit(7)
    return agree(rank, ranks)


SCENARIOS = {
    "all": [
        agree,
        refuse_one,
        raise_before_the_collective,
        choose_a_factor,
        old_gpu,
        differ,
        agree,
    ],
    "die": [die],
}


def main() -> None:
    backend, store, name = sys.argv[1], sys.argv[4], sys.argv[5]
    rank, world = int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
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
