"""A small DSA model, its managers, and tokens whose values tell which they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from sparse_kvcm.dsa import DsaCacheConfig, DSACacheManager, DSACacheManagerV2, OffloadSizes
from sparse_kvcm.models import DsaGeometry, geometry_of

torch.set_num_threads(1)
RANK, ROPE, TOP_K = 128, 64, 16
MIB = 1 << 20


def geometry(**changes: Any) -> DsaGeometry:
    """Six layers in three selection groups: 0 | 1 2 3 | 4 5."""
    config = {
        "model_type": "glm_moe_dsa",
        "num_hidden_layers": 6,
        "indexer_types": ["full", "full", "shared", "shared", "full", "shared"],
        "kv_lora_rank": RANK,
        "qk_rope_head_dim": ROPE,
        "index_topk": TOP_K,
        "max_position_embeddings": 4096,
    }
    made = geometry_of(config | changes)
    assert isinstance(made, DsaGeometry)
    return made


def cache_config(**changes: Any) -> DsaCacheConfig:
    """Four requests of up to 200 tokens, all resident."""
    fields: dict[str, Any] = {
        "geometry": geometry(),
        "max_batch_size": 4,
        "max_seq_len": 200,
        "gpu_quota": 8 * MIB,
        "kv_dtype": "bf16",
        "tokens_per_block": 64 if changes.get("kv_dtype") == "fp8_ds_mla" else 8,
    }
    return DsaCacheConfig(**(fields | changes))


def offload_sizes(config: DsaCacheConfig, **changes: Any) -> OffloadSizes:
    """Leases far smaller than histories."""
    page = config.page_tokens
    fields: dict[str, Any] = {
        "cached_slots": max(24, page),
        "host_pages": config.max_batch_size * config.max_pages,
        "cold_quota": MIB,
    }
    return OffloadSizes(**(fields | changes))


def managers(**changes: Any) -> tuple[DSACacheManager, DSACacheManagerV2, DSACacheManagerV2]:
    """Version 1, then version 2 offloaded and resident."""
    config = cache_config(**changes)
    offload = cache_config(**changes, offload=offload_sizes(config))
    resident = cache_config(**changes, cold_quota=8 * MIB)
    return DSACacheManager(config), DSACacheManagerV2(offload), DSACacheManagerV2(resident)


def latents(request: int, layer: int, positions: Any) -> torch.Tensor:
    """[n, rank + rope], different for each token and layer."""
    return _values(request, 2 * layer, positions, RANK + ROPE)


def keys(request: int, layer: int, positions: Any) -> torch.Tensor:
    """[n, index_head_dim]."""
    return _values(request, 2 * layer + 1, positions, 128)


def _values(request: int, stream: int, positions: Any, width: int) -> torch.Tensor:
    rows = [
        np.random.default_rng([request, stream, int(p)]).standard_normal(width, np.float32)
        for p in positions
    ]
    return torch.from_numpy(np.stack(rows) if rows else np.zeros((0, width), np.float32))


def history(model: DsaGeometry, request: int, begin: int, end: int) -> tuple[Any, Any]:
    """What `import_history` takes."""
    tokens = range(begin, end)
    return (
        {layer: latents(request, layer, tokens) for layer in model.history_layers},
        {group[0]: keys(request, group[0], tokens) for group in model.groups},
    )


def write_tokens(manager: Any, selections: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """A forward: per group a selection, per layer the new tokens. What each layer gathered."""
    step, model = manager.step, manager.config.geometry
    rows = [*step.prepared.requests, *[None] * (len(step.rows) - len(step.prepared.requests))]

    def new(values: Any, layer: int, width: int) -> torch.Tensor:
        return torch.stack(
            [
                torch.full((width,), 77.0)  # padding: nobody may see it
                if one is None
                else values(one.request_id + 1000, layer, [one.history])[0]
                for one in rows
            ]
        )

    gathered = {}
    for number, group in enumerate(model.groups):
        manager.write_index_keys(group[0], new(keys, group[0], 128))
        slots = manager.select(group[0], selections[number])
        for layer in group:
            manager.write_latents(layer, new(latents, layer, RANK + ROPE))
            gathered[layer] = manager.gather_latents(layer, slots)
    return gathered
