"""What a DSA cache manager is made from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from sparse_kvcm._core import (
    CacheTier,
    CacheTierConfig,
    InvalidArgument,
    KvCacheManagerConfig,
    StorageConfig,
)
from sparse_kvcm.adapter.arguments import check_fields
from sparse_kvcm.adapter.config import OffloadSizes, check_sizes, longest_request
from sparse_kvcm.adapter.slot_mapping import PageGeometry
from sparse_kvcm.adapter.store import check_int
from sparse_kvcm.dsa.codecs import IndexScale
from sparse_kvcm.models import DsaGeometry, IndexDtype, KvDtype

FUNCTION = "DsaCacheConfig"


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
            constraints=[longest_request(self.max_seq_len)],
            device=self.device,
        )

    def manager_config(self) -> KvCacheManagerConfig:
        """The manager of version 2: resident, or with latents as selection groups."""
        geometry, sizes = self.geometry, self.offload
        pools: dict[str, Any] = {
            "tokens_per_block": self.page_tokens,
            "gpu_quota": self.gpu_quota,
            "max_util_for_resume": self.max_util_for_resume,
            "constraints": [longest_request(self.max_seq_len)],
            "device": self.device,
        }
        dtypes = self.page_tokens, self.kv_dtype, self.index_dtype
        if sizes is None:
            return KvCacheManagerConfig(
                dense_layers=geometry.layers(*dtypes),
                max_new_units=self.max_seq_len,
                cold_quota=self.cold_quota,
                **pools,
            )
        offload = sizes.manager_fields(
            geometry,
            self.kv_dtype,
            units_per_page=self.page_tokens,
            max_pages=self.max_pages,
            max_requests=self.max_batch_size,
        )
        return KvCacheManagerConfig(dense_layers=geometry.dense_layers(*dtypes), **offload, **pools)
