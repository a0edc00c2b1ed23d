"""Version 1: everything on the GPU, in the plainest way. The baseline of version 2."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparse_kvcm._core import InvalidArgument, Storage
from sparse_kvcm.adapter.config import ManagerFeatures
from sparse_kvcm.adapter.page_store import PageStore
from sparse_kvcm.dsa.buffers import index_pool
from sparse_kvcm.dsa.choice import refuse_in_v1
from sparse_kvcm.dsa.config import DsaCacheConfig
from sparse_kvcm.dsa.latents import ResidentLatents
from sparse_kvcm.dsa.manager import DsaManager

if TYPE_CHECKING:
    import torch


class DSACacheManager(DsaManager):
    """A resident DSA cache on `Storage`: a page table per request, and prompts in steps too.

    Pages of a suspended request stay on the GPU.

    Parameters
    ----------
    config : DsaCacheConfig
        Without `offload` and `cold_quota`.
    features : ManagerFeatures, optional
        What the engine wants beyond.

    Raises
    ------
    InvalidArgument, NotImplementedError
        For what it does not do, see `sparse_kvcm.dsa.choice`.
    """

    def __init__(self, config: DsaCacheConfig, features: ManagerFeatures | None = None) -> None:
        refuse_in_v1(ManagerFeatures(offloads=config.offload is not None))
        if features is not None:
            refuse_in_v1(features)
        if config.cold_quota:
            raise InvalidArgument(
                "[DSACacheManager] cold_quota must be 0: pages of suspended requests stay on the "
                f"GPU, got {config.cold_quota}; use_kv_cache_manager_v2=True gives one that has it"
            )
        self.storage = Storage(config.storage_config())
        super().__init__(
            config,
            PageStore(self.storage, config.max_batch_size, config.max_seq_len),
            ResidentLatents(self.storage, config),
            index_pool(self.storage, config),
        )

    def get_unique_primary_pool(self) -> torch.Tensor:
        """All latents, uint8 ``[slots, layers, 1, page_bytes]``, without a copy."""
        return self._latents.pools[0].slots_view()
