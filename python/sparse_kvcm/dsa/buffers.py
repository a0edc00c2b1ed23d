"""The pools of a DSA model in a storage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparse_kvcm._core import Storage
from sparse_kvcm.dsa.config import DsaCacheConfig
from sparse_kvcm.dsa.pools import RolePool

if TYPE_CHECKING:
    import torch


def key_pools(storage: Storage, config: DsaCacheConfig) -> list[RolePool]:
    """Pools of latents: one role per region where scales are a buffer of their own."""
    layers = {layer: layer for layer in config.geometry.history_layers}
    return [
        RolePool(storage, role, layers, page)
        for role, page in zip(config.key_roles, config.latent_page.apart, strict=True)
    ]


def index_pool(storage: Storage, config: DsaCacheConfig) -> RolePool:
    """The pool of index keys, of layers that own an indexer."""
    geometry = config.geometry
    layers = {leader: geometry.index_layer_of(leader) for leader, *_ in geometry.groups}
    return RolePool(storage, "INDEX_KEY", layers, config.index_page)


def typed_view(pages: torch.Tensor, config: DsaCacheConfig, role: str) -> torch.Tensor:
    """Pages as kernels read them, ``[pages, tokens_per_block, 1, elements]``."""
    import torch

    dtypes = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
    dtype = dtypes.get(config.kv_dtype, torch.uint8) if role == "KEY" else torch.uint8
    return pages.view(dtype).view(len(pages), config.page_tokens, 1, -1)
