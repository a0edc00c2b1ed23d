"""Version 2, on the engine's manager: everything on the GPU, or latents on the host."""

from __future__ import annotations

from sparse_kvcm._core import InvalidState, KvCache, KvCacheManager
from sparse_kvcm.adapter.batch_store import BatchStore
from sparse_kvcm.adapter.config import ManagerFeatures
from sparse_kvcm.dsa.buffers import index_pool
from sparse_kvcm.dsa.choice import refuse_in_v2
from sparse_kvcm.dsa.config import DsaCacheConfig
from sparse_kvcm.dsa.latents import OffloadedLatents, ResidentLatents
from sparse_kvcm.dsa.manager import DsaManager
from sparse_kvcm.ops import ResolveOutputs


class DSACacheManagerV2(DsaManager):
    """A DSA cache on `KvCacheManager`, whose Batch it owns.

    Parameters
    ----------
    config : DsaCacheConfig
        With `offload`, latents are on the host, fetched as they are selected, and steps only
        decode. Without, everything is on the GPU, and prompts may be computed in steps too.
    features : ManagerFeatures, optional
        What the engine wants beyond.

    Raises
    ------
    NotImplementedError
        For what no manager of version 2 does, see `sparse_kvcm.dsa.choice`.
    """

    store: BatchStore

    def __init__(self, config: DsaCacheConfig, features: ManagerFeatures | None = None) -> None:
        refuse_in_v2("DSACacheManagerV2", features or ManagerFeatures())
        self.manager = KvCacheManager(config.manager_config())
        self.batch = self.manager.create_batch(config.max_batch_size, config.max_seq_len)
        store = BatchStore(self.manager, self.batch, config.max_seq_len)
        super().__init__(
            config,
            store,
            ResidentLatents(store.storage, config)
            if config.offload is None
            else OffloadedLatents(store, config),
            index_pool(store.storage, config),
        )

    def kv_cache(self, request_id: int) -> KvCache:
        """A request as the engine's manager has it, for who brings its tokens page by page."""
        self._check_known("kv_cache", request_id)
        return self.store.kv_cache(request_id)

    @property
    def leased_slots(self) -> int:
        """Slots of all leases, in each layer."""
        return self.store.leased_slots

    def resolved(self, layer: int) -> ResolveOutputs:
        """What the last `select` of a layer's group wrote in this step: slots, counts, errors.

        Raises
        ------
        InvalidState
            Before it, and without `offload`, where nothing is resolved.
        """
        if not isinstance(self._latents, OffloadedLatents):
            raise InvalidState(
                "[DSACacheManagerV2] everything is on the GPU, and nothing is resolved"
            )
        self._arguments.layer("resolved", layer)
        return self._latents.resolved(self.config.geometry.selection_group_of[layer])
