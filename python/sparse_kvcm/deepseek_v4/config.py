"""What a DeepSeek-V4 cache manager is made from."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sparse_kvcm._core import (
    BatchDesc,
    CacheTier,
    CacheTierConfig,
    InvalidArgument,
    KvCacheDesc,
    KvCacheManagerConfig,
    StorageConfig,
    SwaScratchReuseConfig,
)
from sparse_kvcm.adapter.arguments import check_fields
from sparse_kvcm.adapter.config import OffloadSizes, check_sizes, longest_request
from sparse_kvcm.adapter.store import check_int
from sparse_kvcm.dsa.codecs import IndexScale
from sparse_kvcm.models import DeepSeekV4Geometry, IndexDtype, KvDtype

FUNCTION = "DeepseekV4CacheConfig"
_PAGES = (128, 256)


@dataclass(frozen=True)
class DeepseekV4CacheConfig:
    """A model, its data types and its memory.

    Attributes
    ----------
    geometry : DeepSeekV4Geometry
    max_batch_size : int
        Most requests of a step.
    max_seq_len : int
        Most tokens of one request.
    gpu_quota : int
        Bytes of the pools on the GPU, raised to what they hold at least.
    kv_dtype, index_dtype : str
        Of compressed entries and of index keys; windows and entries of ratio 128 are FP8 where
        entries are ``nvfp4``.
    tokens_per_block : int
        Page in tokens, 128 or 256.
    kv_scale : float
        As in `codecs.encode_entries`.
    index_scale : str
        As in `sparse_kvcm.dsa.codecs.encode_index_keys`.
    avg_seq_len : int, optional
        Tokens of a typical request, by which memory is divided. None: max_seq_len.
    max_num_tokens : int, optional
        Most tokens of a prompt's step; None: prompts come by `import_history` alone. Windows of
        such a step share scratch slots. Not with `offload`, which only decodes.
    max_util_for_resume : float
        As in `StorageConfig`.
    cold_quota : int
        Host bytes for the pages of suspended requests, which stay on the GPU without. With
        `offload` 0: it has its own.
    device : str
    offload : OffloadSizes, optional
        Keep entries of ratio 4 on the host; slots count entries. None: everything on the GPU.

    Raises
    ------
    InvalidArgument
        Naming the field, what it may be, and its value.
    """

    geometry: DeepSeekV4Geometry
    max_batch_size: int
    max_seq_len: int
    gpu_quota: int
    kv_dtype: KvDtype = "bf16"
    index_dtype: IndexDtype = "fp8"
    tokens_per_block: int = 128
    kv_scale: float = 1.0
    index_scale: IndexScale = "fp32"
    avg_seq_len: int | None = None
    max_num_tokens: int | None = None
    max_util_for_resume: float = 0.97
    cold_quota: int = 0
    device: str = "cpu"
    offload: OffloadSizes | None = None

    def __post_init__(self) -> None:
        check_fields(FUNCTION, self, DeepSeekV4Geometry)
        check_sizes(FUNCTION, self.offload)
        if self.tokens_per_block not in _PAGES:
            raise InvalidArgument(
                f"[{FUNCTION}] tokens_per_block must be 128 or 256, got {self.tokens_per_block}"
            )
        check_int(FUNCTION, "cold_quota", self.cold_quota, 0)
        for field in ("max_num_tokens", "avg_seq_len"):
            if getattr(self, field) is not None:
                check_int(FUNCTION, field, getattr(self, field), 1)
        if self.avg_seq_len is not None and self.avg_seq_len > self.max_seq_len:
            raise InvalidArgument(
                f"[{FUNCTION}] avg_seq_len must be in [1, max_seq_len {self.max_seq_len}], "
                f"got {self.avg_seq_len}"
            )
        if self.offload is None:
            page = self.tokens_per_block
            self.geometry.check_resident(page, self.kv_dtype, self.index_dtype)
        else:
            self._check_offload(self.offload)

    def _check_offload(self, sizes: OffloadSizes) -> None:
        if self.max_num_tokens is not None:
            raise InvalidArgument(
                f"[{FUNCTION}] max_num_tokens must be None with offload: an offloading worker "
                f"decodes only, got {self.max_num_tokens}"
            )
        if self.cold_quota != 0:
            raise InvalidArgument(
                f"[{FUNCTION}] cold_quota must be 0 with offload, which has its own, "
                f"got {self.cold_quota}"
            )
        if sizes.cached_slots < self.geometry.top_k:
            raise InvalidArgument(
                f"[{FUNCTION}] cached_slots must be at least a selection of top-k "
                f"{self.geometry.top_k} entries, in pages of {self.units_per_page}, "
                f"got {sizes.cached_slots}"
            )

    @property
    def units_per_page(self) -> int:
        """Entries of ratio 4 in a page."""
        return self.tokens_per_block // self.geometry.tokens_per_unit

    @property
    def max_pages(self) -> int:
        """Pages of the longest request."""
        return self.pages(self.max_seq_len)

    def pages(self, tokens: int) -> int:
        """Pages of a request of so many tokens."""
        return math.ceil(tokens / self.tokens_per_block)

    def units(self, tokens: int) -> int:
        """Entries that a request of so many tokens may have, at least 1."""
        return math.ceil(tokens / self.geometry.tokens_per_unit)

    @property
    def constraints(self) -> list[BatchDesc]:
        """What the pools hold at least: the longest request, and a prompt's step."""
        longest = longest_request(self.max_seq_len)
        return [longest, *([BatchDesc([self._context])] if self.max_num_tokens else [])]

    @property
    def typical_step(self) -> BatchDesc:
        """What memory is divided by: one decodes, or one computes its prompt beside the others.

        Who decodes is at the first token of a last page, where windows are at their widest:
        at 33,024 tokens of pages of 256 the last token would have one page of a window, not two.
        """
        pages = self.pages(self.avg_seq_len or self.max_seq_len)
        length = (pages - 1) * self.tokens_per_block + 1
        decode = KvCacheDesc(length, length - 1)
        if self.max_num_tokens is None:  # balanced for one is balanced for any number
            return BatchDesc([decode])
        return BatchDesc([self._context, *[decode] * (self.max_batch_size - 1)])

    @property
    def _context(self) -> KvCacheDesc:
        return KvCacheDesc(min(self.max_num_tokens or 1, self.max_seq_len), 0)

    def storage_config(self) -> StorageConfig:
        """Everything on the GPU, and pages of suspended requests on the host."""
        geometry = self.geometry
        tiers = [CacheTierConfig(CacheTier.GPU_MEM, self.gpu_quota)]
        if self.cold_quota:
            tiers.append(CacheTierConfig(CacheTier.HOST_MEM, self.cold_quota))
        return StorageConfig(
            cache_tiers=tiers,
            layers=geometry.layers(self.tokens_per_block, self.kv_dtype, self.index_dtype),
            tokens_per_block=self.tokens_per_block,
            tokens_per_unit=geometry.tokens_per_unit,
            max_util_for_resume=self.max_util_for_resume,
            constraints=self.constraints,
            typical_step=self.typical_step,
            swa_scratch_reuse=SwaScratchReuseConfig() if self.max_num_tokens else None,
            device=self.device,
        )

    def manager_config(self, sizes: OffloadSizes) -> KvCacheManagerConfig:
        """Entries of ratio 4 as selection groups, everything else as dense layers."""
        geometry = self.geometry
        offload = sizes.manager_fields(
            geometry,
            self.kv_dtype,
            units_per_page=self.units_per_page,
            max_pages=self.max_pages,
            max_requests=self.max_batch_size,
        )
        return KvCacheManagerConfig(
            tokens_per_block=self.tokens_per_block,
            tokens_per_unit=geometry.tokens_per_unit,
            dense_layers=geometry.dense_layers(
                self.tokens_per_block, self.kv_dtype, self.index_dtype
            ),
            gpu_quota=self.gpu_quota,
            max_util_for_resume=self.max_util_for_resume,
            constraints=self.constraints,
            typical_step=self.typical_step,
            device=self.device,
            **offload,
        )
