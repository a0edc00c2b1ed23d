"""What a budget holds of a slice, by the rules of `sparse_kvcm.sizing`.

That needs pydantic, which a GPU machine may lack; this asks the native objects alone. A test holds
both to equal numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from benchmarks.decode_slice.model import SliceModel
from sparse_kvcm import (
    BatchDesc,
    CacheTier,
    CacheTierConfig,
    KvCacheDesc,
    KvCacheManagerConfig,
    SelectionGroupConfig,
    StorageConfig,
    StorageLayout,
    planned_batch_memory,
    planned_memory,
    storage_config,
)

Mode = Literal["resident", "offloaded"]
_GPU = 0


@dataclass(frozen=True)
class Budget:
    """A slice's budget, and the longest of its requests.

    Attributes
    ----------
    model : SliceModel
    seq_len : int
        Tokens.
    factor : float
        Cached slots of a lease in selections.
    device : str
    """

    model: SliceModel
    seq_len: int
    factor: float
    device: str

    @property
    def max_units(self) -> int:
        """Of a request."""
        return math.ceil(self.seq_len / self.model.geometry.tokens_per_unit)

    @property
    def pages(self) -> int:
        """Of a request."""
        return math.ceil(self.seq_len / self.model.tokens_per_block)

    @property
    def cached_slots(self) -> int:
        """N of a lease."""
        page = self.model.units_per_page
        return math.ceil(math.ceil(self.factor * self.model.geometry.top_k) / page) * page

    @property
    def lease_slots(self) -> int:
        """N + W of a lease, which has one page of window."""
        return self.cached_slots + self.model.units_per_page

    def largest_batch(self, mode: Mode) -> int:
        """Requests that fit."""
        low, high = 0, 1
        while self.pool_quota(mode, high) > 0:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.pool_quota(mode, middle) > 0 else (low, middle)
        return low

    def pool_quota(self, mode: Mode, batch: int) -> int:
        """Bytes for the pools of a batch; 0 if they hold less than it."""
        quota = self.model.budget - self._fixed_bytes(mode, batch)
        if quota <= 0:
            return 0
        layout = StorageLayout(self._storage(mode, batch, quota))
        quota -= quota % layout.granule_bytes(_GPU)
        return quota if 0 < quota >= layout.min_quota(_GPU) else 0

    def config(self, mode: Mode, batch: int) -> KvCacheManagerConfig:
        """The manager of a batch that fits."""
        return self._config(mode, batch, self.pool_quota(mode, batch), batch * self.pages)

    def _config(self, mode: Mode, batch: int, quota: int, host_pages: int) -> KvCacheManagerConfig:
        geometry, page = self.model.geometry, self.model.tokens_per_block
        pools = {"gpu_quota": quota, "constraints": self._constraints(batch), **self._fields}
        if mode == "resident":
            layers = geometry.layers(page, "fp8", "fp8")
            return KvCacheManagerConfig(dense_layers=layers, max_new_units=self.seq_len, **pools)
        layout, units = geometry.unit_layout("fp8"), self.model.units_per_page
        lease_pages = min(self.lease_slots // units, math.ceil(self.max_units / units))
        return KvCacheManagerConfig(
            groups=[SelectionGroupConfig(g, geometry.top_k, layout) for g in geometry.groups],
            cached_slots=self.cached_slots,
            window_slots=units,
            arena_pages=batch * lease_pages,
            host_pages=host_pages,
            max_leases=batch,
            dense_layers=geometry.dense_layers(page, "fp8", "fp8"),
            **pools,
        )

    def _storage(self, mode: Mode, batch: int, quota: int) -> StorageConfig:
        if mode == "offloaded":
            return storage_config(self._config(mode, batch, quota, 1))
        return StorageConfig(
            cache_tiers=[CacheTierConfig(CacheTier.GPU_MEM, quota)],
            layers=self.model.geometry.layers(self.model.tokens_per_block, "fp8", "fp8"),
            constraints=self._constraints(batch),
            **self._fields,
        )

    def _fixed_bytes(self, mode: Mode, batch: int) -> int:
        """What is no pool: arena, entries, the Batch's arrays."""
        if mode == "resident":
            return 0
        config = self._config(mode, batch, 1, 1)
        memory = planned_memory(config)
        arrays = planned_batch_memory(config, batch, self.max_units).device_bytes
        return memory.arena_bytes + memory.metadata_bytes + arrays

    @cached_property
    def _fields(self) -> dict[str, Any]:
        return {
            "tokens_per_block": self.model.tokens_per_block,
            "tokens_per_unit": self.model.geometry.tokens_per_unit,
            "typical_step": self._at_widest(1),
            "device": self.device,
        }

    def _constraints(self, batch: int) -> list[BatchDesc]:
        return [BatchDesc([KvCacheDesc(self.seq_len, self.seq_len - 1)]), self._at_widest(batch)]

    def _at_widest(self, batch: int) -> BatchDesc:
        """At the first token of the last page, where windows have a page more than at its end."""
        tokens = (self.pages - 1) * self.model.tokens_per_block + 1
        return BatchDesc([KvCacheDesc(tokens, tokens - 1)] * batch)
