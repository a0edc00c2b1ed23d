"""What a worker is sized for: a model, its data types, and the lengths of requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sparse_kvcm._core import (
    LEAST_UTIL_FOR_RESUME,
    MAX_ARENA_SLOTS,
    MAX_CACHED_SLOTS,
    MAX_PAGE_TOKENS,
    MAX_ROWS,
    MAX_TIER_BYTES,
    MAX_UNITS,
    BatchDesc,
    InvalidArgument,
    KvCacheDesc,
    KvCacheManagerConfig,
    LayerConfig,
    SelectionGroupConfig,
    SwaScratchReuseConfig,
)
from sparse_kvcm.models import IndexDtype, KvDtype, ModelGeometry
from sparse_kvcm.sizing.checks import check_int

FUNCTION = "Workload"
MAX_STAGING_SLOTS = 1 << 20
SYSTEM_PAGE = 4096


@dataclass(frozen=True)
class Workload:
    """What all sizes follow from, apart from budgets and the batch.

    Attributes
    ----------
    geometry : ModelGeometry
    kv_dtype, index_dtype : str
        Of units and of the indexer's keys.
    max_seq_len : int
        Tokens of the longest request.
    avg_seq_len : int, optional
        Tokens of a usual one.
    tokens_per_block : int
        Page in tokens; 0 = the model's usual one.
    gpu_cache_factor : float
        Cached slots of a lease in selections.
    max_util_for_resume : float
        The most of a pool that requests may take when one resumes.
    host_cache_size : int
        Host bytes for pages of suspended requests; 0 = none, and under offload the least.
    num_batches : int
        Batches at a time: each has its own buffers. 2 with an overlap scheduler.
    device : str
    max_num_tokens : int
        Tokens of a prompt's step without offload; 0: prompts come in computed.
    staging_slots : int
        Pages of history, of all layers together, that transfers stage on the host at a time.
    """

    geometry: ModelGeometry
    max_seq_len: int
    kv_dtype: KvDtype = "bf16"
    index_dtype: IndexDtype = "fp8"
    avg_seq_len: int | None = None
    tokens_per_block: int = 0
    gpu_cache_factor: float = 2.0
    max_util_for_resume: float = 0.97
    host_cache_size: int = 0
    num_batches: int = 1
    device: str = "cpu"
    max_num_tokens: int = 0
    staging_slots: int = 0

    def __post_init__(self) -> None:
        if self.tokens_per_block == 0:
            object.__setattr__(self, "tokens_per_block", self.geometry.tokens_per_block)
        check_int(FUNCTION, "tokens_per_block", self.tokens_per_block, 1, MAX_PAGE_TOKENS)
        self.geometry.check_page(self.tokens_per_block, self.kv_dtype)
        self.geometry.unit_layout(self.kv_dtype)
        self.geometry.index_layout(self.index_dtype)
        check_int(
            FUNCTION, "max_seq_len", self.max_seq_len, 1, MAX_UNITS * self.geometry.tokens_per_unit
        )
        check_int(FUNCTION, "avg_seq_len", self.usual_seq_len, 1, self.max_seq_len)
        check_int(FUNCTION, "num_batches", self.num_batches, 1, 16)
        check_int(FUNCTION, "max_num_tokens", self.max_num_tokens, 0, MAX_TIER_BYTES)
        check_int(FUNCTION, "staging_slots", self.staging_slots, 0, MAX_STAGING_SLOTS)
        if not LEAST_UTIL_FOR_RESUME <= self.max_util_for_resume <= 1:
            raise InvalidArgument(
                f"[{FUNCTION}] max_util_for_resume must be in [{LEAST_UTIL_FOR_RESUME}, 1], "
                f"got {self.max_util_for_resume}"
            )
        most = MAX_CACHED_SLOTS // self.units_per_page * self.units_per_page / self.geometry.top_k
        if not 1 <= self.gpu_cache_factor <= most:
            raise InvalidArgument(
                f"[{FUNCTION}] gpu_cache_factor must be in [1, {most:g}], which is "
                f"{MAX_CACHED_SLOTS} cached slots in whole pages of {self.units_per_page} units by "
                f"top-k {self.geometry.top_k}, got {self.gpu_cache_factor}"
            )

    @property
    def usual_seq_len(self) -> int:
        """The length that automatic sizes go by."""
        return self.max_seq_len if self.avg_seq_len is None else self.avg_seq_len

    @property
    def units_per_page(self) -> int:
        """Page in units."""
        return self.tokens_per_block // self.geometry.tokens_per_unit

    @property
    def max_units(self) -> int:
        """Units of the longest request."""
        return math.ceil(self.max_seq_len / self.geometry.tokens_per_unit)

    @property
    def transfer_staging(self) -> int:
        """Pinned bytes in which transfers land, as `sparse_kvcm.transfer.staging` takes them."""
        layout = self.geometry.unit_layout(self.kv_dtype)
        slot = len(self.geometry.history_layers) * layout.page_bytes(self.units_per_page)
        return self.staging_slots * slot + (SYSTEM_PAGE if self.staging_slots else 0)

    @property
    def cached_slots(self) -> int:
        """N of a lease: the factor's selections, in whole pages."""
        units = math.ceil(self.gpu_cache_factor * self.geometry.top_k)
        return math.ceil(units / self.units_per_page) * self.units_per_page

    @property
    def window_slots(self) -> int:
        """W of a lease: one page."""
        return self.units_per_page

    @property
    def lease_pages(self) -> int:
        """Arena pages of the largest lease: short requests are all window."""
        pages = math.ceil(self.max_units / self.units_per_page)
        return min((self.cached_slots + self.window_slots) // self.units_per_page, pages)

    @property
    def most_leases(self) -> int:
        """Leases whose slots, and those of the trash page, have numbers of 31 bits."""
        return (MAX_ARENA_SLOTS // self.units_per_page - 1) // self.lease_pages

    def pages(self, tokens: int) -> int:
        """History pages of a request of so many tokens."""
        return math.ceil(tokens / self.tokens_per_block)

    def selection_groups(self) -> list[SelectionGroupConfig]:
        """Selection groups as the manager takes them."""
        layout = self.geometry.unit_layout(self.kv_dtype)
        top_k = self.geometry.top_k
        return [SelectionGroupConfig(group, top_k, layout) for group in self.geometry.groups]

    def pool_layers(self, *, offload: bool) -> list[LayerConfig]:
        """Layers whose pages are in pools on the GPU: under offload the dense ones, else all."""
        page, kv, index = self.tokens_per_block, self.kv_dtype, self.index_dtype
        return _pool_layers(self.geometry, page, kv, index, offload)

    def manager_config(
        self,
        batch: int,
        host_pages: int = 1,
        *,
        gpu_quota: int = 1,
        constraints: Sequence[BatchDesc] = (),
    ) -> KvCacheManagerConfig:
        """The manager of an offloading worker: what is planned, sized and allocated.

        Parameters
        ----------
        batch : int
            Requests at a time.
        host_pages : int
            Pages of history.
        gpu_quota : int
            Bytes for pools of dense layers.
        constraints : sequence of BatchDesc
            What the pools must hold.
        """
        check_int(FUNCTION, "max_batch_size", batch, 1, min(MAX_ROWS, self.most_leases))
        return KvCacheManagerConfig(
            groups=self.selection_groups(),
            cached_slots=self.cached_slots,
            window_slots=self.window_slots,
            arena_pages=batch * self.lease_pages,
            host_pages=host_pages,
            max_leases=batch,
            dense_layers=self.pool_layers(offload=True),
            gpu_quota=gpu_quota,
            cold_quota=self.host_cache_size,
            constraints=constraints,
            **self.storage_fields(),
        )

    def decode_step(self, batch: int, tokens: int) -> BatchDesc:
        """A step in which `batch` requests of so many tokens each add one."""
        return _decode_step(batch, tokens)

    def usual_step(self, batch: int) -> BatchDesc:
        """A step of `batch` requests of the usual length, at their widest."""
        return self.decode_step(batch, self.sampled_length(self.usual_seq_len))

    def resident_steps(self, batch: int) -> dict[str, Any]:
        """What a storage with prompts' steps has beyond `storage_fields`: nothing without them.

        One request computes its prompt while the others decode; pages of windows that nobody reads
        after the step share slots.
        """
        if self.max_num_tokens == 0:
            return {}
        decodes = [self.usual_step(1).kv_caches[0]] * (batch - 1)
        return {
            "typical_step": BatchDesc([self._context, *decodes]),
            "swa_scratch_reuse": SwaScratchReuseConfig(),
        }

    def prompt_steps(self) -> list[BatchDesc]:
        """The largest step of a prompt, if there are any."""
        return [BatchDesc([self._context])] if self.max_num_tokens else []

    @property
    def _context(self) -> KvCacheDesc:
        return KvCacheDesc(min(self.max_num_tokens, self.max_seq_len), 0)

    def sampled_length(self, tokens: int) -> int:
        """The first token of the last page of a request.

        It has as many pages of full history as the whole request, and its windows have just begun
        another page: they are at their widest, which the last token of a page would miss. So a
        batch that fits at this length fits at the whole one.
        """
        return (self.pages(tokens) - 1) * self.tokens_per_block + 1

    def storage_fields(self) -> dict[str, Any]:
        """What all configurations of this workload have in common."""
        return {
            "tokens_per_block": self.tokens_per_block,
            "tokens_per_unit": self.geometry.tokens_per_unit,
            "max_util_for_resume": self.max_util_for_resume,
            # Pools are balanced for one request, and so for any number. It has no context.
            "typical_step": self.usual_step(1),
            "device": self.device,
        }


@lru_cache(maxsize=1024)  # a search asks for the same batches again and again
def _decode_step(batch: int, tokens: int) -> BatchDesc:
    return BatchDesc([KvCacheDesc(tokens, tokens - 1)] * batch)


@lru_cache(maxsize=64)
def _pool_layers(
    geometry: ModelGeometry, page: int, kv: KvDtype, index: IndexDtype, offload: bool
) -> list[LayerConfig]:
    return (geometry.dense_layers if offload else geometry.layers)(page, kv, index)
