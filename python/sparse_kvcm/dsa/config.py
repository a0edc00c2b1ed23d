"""What a DSA cache manager is made from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from sparse_kvcm._core import (
    BatchDesc,
    CacheTier,
    CacheTierConfig,
    InvalidArgument,
    KvCacheDesc,
    KvCacheManagerConfig,
    SelectionGroupConfig,
    StorageConfig,
)
from sparse_kvcm.adapter.arguments import check_fields
from sparse_kvcm.adapter.store import check_int
from sparse_kvcm.dsa.codecs import IndexScale
from sparse_kvcm.dsa.slot_mapping import PageGeometry
from sparse_kvcm.models import DsaGeometry, IndexDtype, KvDtype

FUNCTION = "DsaCacheConfig"


@dataclass(frozen=True)
class OffloadSizes:
    """Memory of an offloading manager, beside its pools.

    Attributes
    ----------
    cached_slots : int
        N of a lease: a multiple of a page, at least the model's top-k.
    host_pages : int
        Pages of host history, for all requests together.
    window_slots : int, optional
        W of a lease, a multiple of a page. None: one page.
    arena_pages : int, optional
        Pages of all leases. None: for a lease of N + W of each request.
    cold_quota : int
        Pinned host bytes for the pages in its pools of suspended requests.
    """

    cached_slots: int
    host_pages: int
    window_slots: int | None = None
    arena_pages: int | None = None
    cold_quota: int = 0


def check_sizes(function: str, sizes: OffloadSizes | None) -> None:
    """Refuse sizes that are no numbers of slots, pages and bytes."""
    if sizes is None:
        return
    if not isinstance(sizes, OffloadSizes):
        raise InvalidArgument(f"[{function}] offload must be OffloadSizes or None, got {sizes!r}")
    for field, least in (("cached_slots", 1), ("host_pages", 1), ("cold_quota", 0)):
        check_int(function, f"offload.{field}", getattr(sizes, field), least)
    for field in ("window_slots", "arena_pages"):
        if getattr(sizes, field) is not None:
            check_int(function, f"offload.{field}", getattr(sizes, field), 1)


@dataclass(frozen=True)
class DsaCacheConfig:
    """A model, its data types and its memory.

    Attributes
    ----------
    geometry : DsaGeometry
    max_batch_size : int
        Most requests of a step.
    max_seq_len : int
        Most tokens of one request.
    gpu_quota : int
        Bytes of the pools on the GPU, raised to what one request of max_seq_len takes.
    kv_dtype, index_dtype : str
        Of latents and of index keys.
    tokens_per_block : int, optional
        Page in tokens. None: the model's usual one.
    kv_scale : float
        As in `codecs.encode_latents`.
    index_scale : str
        As in `codecs.encode_index_keys`.
    max_util_for_resume : float
        As in `StorageConfig`.
    cold_quota : int
        The same without `offload`, with version 2 alone; 0: requests cannot be suspended.
    device : str
    offload : OffloadSizes, optional
        Keep latents on the host. None: everything on the GPU.

    Raises
    ------
    InvalidArgument
        Naming the field, what it may be, and its value.
    """

    geometry: DsaGeometry
    max_batch_size: int
    max_seq_len: int
    gpu_quota: int
    kv_dtype: KvDtype = "bf16"
    index_dtype: IndexDtype = "fp8"
    tokens_per_block: int | None = None
    kv_scale: float = 1.0
    index_scale: IndexScale = "fp32"
    max_util_for_resume: float = 0.97
    cold_quota: int = 0
    device: str = "cpu"
    offload: OffloadSizes | None = None

    def __post_init__(self) -> None:
        check_fields(FUNCTION, self, DsaGeometry)
        check_sizes(FUNCTION, self.offload)
        self.geometry.check_page(self.page_tokens, self.kv_dtype)
        if self.offload is None:
            self.geometry.check_resident(self.page_tokens, self.kv_dtype, self.index_dtype)
        check_int(FUNCTION, "cold_quota", self.cold_quota, 0)
        if not 1 <= self.max_seq_len <= self.geometry.max_seq_len:
            raise InvalidArgument(
                f"[{FUNCTION}] max_seq_len must be in [1, {self.geometry.max_seq_len}], what "
                f"{self.geometry.name} takes, got {self.max_seq_len}"
            )
        if self.offload is not None and self.cold_quota != 0:
            raise InvalidArgument(
                f"[{FUNCTION}] cold_quota must be 0 with offload, which has its own, "
                f"got {self.cold_quota}"
            )
        if self.offload is not None and self.offload.cached_slots < self.geometry.top_k:
            least = self.pages(self.geometry.top_k) * self.page_tokens
            raise InvalidArgument(
                f"[{FUNCTION}] cached_slots must be at least {least}, whole pages of a selection "
                f"of top-k {self.geometry.top_k}, got {self.offload.cached_slots}"
            )

    @property
    def page_tokens(self) -> int:
        """Tokens of a page."""
        return self.tokens_per_block or self.geometry.tokens_per_block

    @property
    def max_pages(self) -> int:
        """Pages of the longest request."""
        return self.pages(self.max_seq_len)

    @property
    def key_roles(self) -> tuple[str, ...]:
        """Roles of a latent's buffers."""
        return self.geometry.region_roles(self.kv_dtype) or ("KEY",)

    @property
    def latent_width(self) -> int:
        """Elements of a latent."""
        return self.geometry.kv_lora_rank + self.geometry.qk_rope_head_dim

    @property
    def latent_page(self) -> PageGeometry:
        """Latents in a page of an arena, with all their regions."""
        return PageGeometry(self.geometry.unit_layout(self.kv_dtype), self.page_tokens)

    @property
    def index_page(self) -> PageGeometry:
        """Index keys in a page."""
        return PageGeometry(self.geometry.index_layout(self.index_dtype), self.page_tokens)

    def pages(self, tokens: int) -> int:
        """Pages of a request of so many tokens."""
        return math.ceil(tokens / self.page_tokens)

    def storage_config(self) -> StorageConfig:
        """The storage of version 1: everything on the GPU."""
        return StorageConfig(
            cache_tiers=[CacheTierConfig(CacheTier.GPU_MEM, self.gpu_quota)],
            layers=self.geometry.layers(self.page_tokens, self.kv_dtype, self.index_dtype),
            tokens_per_block=self.page_tokens,
            max_util_for_resume=self.max_util_for_resume,
            constraints=[self.longest_request],
            device=self.device,
        )

    def manager_config(self) -> KvCacheManagerConfig:
        """The manager of version 2: resident, or with latents as selection groups."""
        geometry, sizes = self.geometry, self.offload
        pools: dict[str, Any] = {
            "tokens_per_block": self.page_tokens,
            "gpu_quota": self.gpu_quota,
            "cold_quota": self.cold_quota if sizes is None else sizes.cold_quota,
            "max_util_for_resume": self.max_util_for_resume,
            "constraints": [self.longest_request],
            "device": self.device,
        }
        dtypes = self.page_tokens, self.kv_dtype, self.index_dtype
        if sizes is None:
            return KvCacheManagerConfig(
                dense_layers=geometry.layers(*dtypes), max_new_units=self.max_seq_len, **pools
            )
        window = self.page_tokens if sizes.window_slots is None else sizes.window_slots
        lease = min(self.pages(sizes.cached_slots + window), self.max_pages)
        layout, roles = geometry.unit_layout(self.kv_dtype), geometry.region_roles(self.kv_dtype)
        return KvCacheManagerConfig(
            groups=[
                SelectionGroupConfig(group, geometry.top_k, layout, roles)
                for group in geometry.groups
            ],
            cached_slots=sizes.cached_slots,
            window_slots=window,
            arena_pages=sizes.arena_pages or self.max_batch_size * lease,
            host_pages=sizes.host_pages,
            max_leases=self.max_batch_size,
            dense_layers=geometry.dense_layers(*dtypes),
            **pools,
        )

    @property
    def longest_request(self) -> BatchDesc:
        """What the pools hold at least."""
        return BatchDesc([KvCacheDesc(self.max_seq_len, self.max_seq_len - 1)])
