"""What a worker is sized for: a model, its data types, and the lengths of requests."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sparse_kvcm._core import (
    BatchDesc,
    InvalidArgument,
    KvCacheDesc,
    KvCacheManagerConfig,
    SelectionGroupConfig,
)
from sparse_kvcm.models import IndexDtype, KvDtype, ModelGeometry

FUNCTION = "Workload"
MAX_UNITS = 2**24 - 1
MAX_CACHED_SLOTS = 65_535
MAX_SLOTS = 2**31 - 1
MAX_BATCH_SIZE = 1 << 20
MAX_HISTORY_PAGES = 2**31 - 1
MAX_BUDGET = 1 << 60  # bytes, the most of a tier
LEAST_UTIL = 0.001


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
        Host bytes for pages of suspended requests; 0 = none.
    num_batches : int
        Batches at a time: each has its own buffers. 2 with an overlap scheduler.
    device : str
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

    def __post_init__(self) -> None:
        if self.tokens_per_block == 0:
            object.__setattr__(self, "tokens_per_block", self.geometry.tokens_per_block)
        _check("tokens_per_block", self.tokens_per_block, 1, 65_536)
        self.geometry.check_page(self.tokens_per_block, self.kv_dtype)
        self.geometry.unit_layout(self.kv_dtype)
        self.geometry.index_layout(self.index_dtype)
        _check("max_seq_len", self.max_seq_len, 1, MAX_UNITS * self.geometry.tokens_per_unit)
        _check("avg_seq_len", self.usual_seq_len, 1, self.max_seq_len)
        _check("num_batches", self.num_batches, 1, 16)
        if not LEAST_UTIL <= self.max_util_for_resume <= 1:
            raise InvalidArgument(
                f"[{FUNCTION}] max_util_for_resume must be in [{LEAST_UTIL}, 1], "
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
        return (MAX_SLOTS // self.units_per_page - 1) // self.lease_pages

    def pages(self, tokens: int) -> int:
        """History pages of a request of so many tokens."""
        return math.ceil(tokens / self.tokens_per_block)

    def selection_groups(self) -> list[SelectionGroupConfig]:
        """Selection groups as the manager takes them."""
        layout = self.geometry.unit_layout(self.kv_dtype)
        top_k = self.geometry.top_k
        return [SelectionGroupConfig(group, top_k, layout) for group in self.geometry.groups]

    def manager_config(self, batch: int, host_pages: int) -> KvCacheManagerConfig:
        """A manager for `batch` requests at a time with `host_pages` pages of history."""
        _check("max_batch_size", batch, 1, min(MAX_BATCH_SIZE, self.most_leases))
        return KvCacheManagerConfig(
            groups=self.selection_groups(),
            cached_slots=self.cached_slots,
            window_slots=self.window_slots,
            arena_pages=batch * self.lease_pages,
            host_pages=host_pages,
            max_leases=batch,
            tokens_per_block=self.tokens_per_block,
            tokens_per_unit=self.geometry.tokens_per_unit,
            device=self.device,
        )

    def decode_step(self, batch: int, tokens: int) -> BatchDesc:
        """A step in which `batch` requests of so many tokens each add one."""
        return _decode_step(batch, tokens)

    def sampled_length(self, tokens: int) -> int:
        """The first token of the last page of a request.

        It has as many pages of full history as the whole request, and its windows have just begun
        another page: they are at their widest, which the last token of a page would miss. So a
        batch that fits at this length fits at the whole one.
        """
        return (self.pages(tokens) - 1) * self.tokens_per_block + 1

    def storage_fields(self) -> dict[str, Any]:
        """What every StorageConfig of this workload has in common."""
        return {
            "tokens_per_block": self.tokens_per_block,
            "tokens_per_unit": self.geometry.tokens_per_unit,
            "max_util_for_resume": self.max_util_for_resume,
            "device": self.device,
        }


@lru_cache(maxsize=1024)  # a search asks for the same batches again and again
def _decode_step(batch: int, tokens: int) -> BatchDesc:
    return BatchDesc([KvCacheDesc(tokens, tokens - 1)] * batch)


def _check(field: str, value: int, low: int, high: int) -> None:
    if not isinstance(value, int) or not low <= value <= high:
        raise InvalidArgument(
            f"[{FUNCTION}] {field} must be an integer in [{low}, {high}], got {value!r}"
        )
