"""Small models, machines and workers for the tests of sizing and planning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparse_kvcm import _core
from sparse_kvcm.config import WorkerConfig
from sparse_kvcm.models import ModelGeometry, geometry_of
from sparse_kvcm.sizing import HostMemory, HostTerm, Machine, Workload

MIB = 1 << 20
GIB = 1 << 30
PLENTY = HostMemory({HostTerm.AVAILABLE: 64 * GIB})


def available(size: int) -> HostMemory:
    """A machine on which so many bytes may be pinned."""
    return HostMemory({HostTerm.AVAILABLE: size})


def tiny_dsa(layers: int = 6, top_k: int = 64, **changes: Any) -> ModelGeometry:
    """Latents of 36 elements; layers 0 and 1 alone, then groups of 4."""
    config: dict[str, Any] = {
        "model_type": "glm_moe_dsa",
        "num_hidden_layers": layers,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 4,
        "index_topk": top_k,
        "index_topk_freq": 4,
        "index_skip_topk_offset": 3,
        "index_head_dim": 128,
        "max_position_embeddings": 1 << 20,
    }
    return geometry_of(config | changes, "tiny")


def tiny_v4(ratios: tuple[int, ...] = (0, 4, 128, 4), **changes: Any) -> ModelGeometry:
    config: dict[str, Any] = {
        "model_type": "deepseek_v4",
        "num_hidden_layers": len(ratios),
        "head_dim": 64,
        "qk_rope_head_dim": 16,
        "sliding_window": 128,
        "index_topk": 32,
        "index_head_dim": 128,
        "compress_ratios": list(ratios),
        "max_position_embeddings": 1 << 20,
    }
    return geometry_of(config | changes, "tiny_v4")


def small(max_seq_len: int = 1000, **changes: Any) -> Workload:
    fields: dict[str, Any] = {
        "geometry": tiny_dsa(),
        "max_seq_len": max_seq_len,
        "kv_dtype": "fp8",
    }
    return Workload(**(fields | changes))


def worker_config(
    batch: int = 3,
    max_seq_len: int = 1000,
    offload: dict[str, Any] | None = None,
    algorithm: str = "dsa",
    **kv: Any,
) -> WorkerConfig:
    """An offloading worker that passes all gates."""
    attention = {"enable_kv_cache_offload": True, "kv_cache_offload_config": offload or {}}
    return WorkerConfig.model_validate(
        {
            "sparse_attention_config": {"algorithm": algorithm, **attention},
            "kv_cache_config": {
                "max_batch_size": batch,
                "max_seq_len": max_seq_len,
                "dtype": "fp8",
                **kv,
            },
            "cache_transceiver_config": {"backend": "in_process"},
            "generation_only": True,
        }
    )


def machine(budget: int = 64 * MIB, host: HostMemory = PLENTY) -> Machine:
    return Machine(budget, host=host)


class FakeSystem:
    """A folder that stands for "/", with what the limits are read from."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str) -> None:
        target = self.root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def available(self, size: int) -> None:
        self.write("/proc/meminfo", f"MemTotal: 1 kB\nMemAvailable: {size // 1024} kB\n")

    def memlock(self, size: int) -> None:
        line = f"Max locked memory         {size}                {size}                bytes\n"
        self.write("/proc/self/limits", line)
        self.write("/proc/self/status", "CapEff:\t0000000000000000\n")

    def group(self, path: str, limit: int, used: int, cache: int = 0) -> None:
        """A group of version 2."""
        folder = f"/sys/fs/cgroup{path}"
        self.write("/proc/self/cgroup", "0::/pod/job\n")
        self.write(f"{folder}/memory.max", f"{limit}\n")
        self.write(f"{folder}/memory.current", f"{used}\n")
        self.write(f"{folder}/memory.stat", f"anon 1\ninactive_file {cache}\nactive_file 0\n")

    def group_v1(self, limit: int, used: int, cache: int = 0) -> None:
        folder = "/sys/fs/cgroup/memory/job"
        self.write("/proc/self/cgroup", "4:memory:/job\n")
        self.write(f"{folder}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{folder}/memory.usage_in_bytes", f"{used}\n")
        self.write(f"{folder}/memory.stat", f"total_inactive_file {cache}\n")

    def limits(self) -> _core.HostLimits:
        return _core.read_host_limits(str(self.root))
