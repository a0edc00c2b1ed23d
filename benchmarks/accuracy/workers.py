"""A model, a cache manager of its kind and a step driver: what decodes, resident or offloaded.

Records are the managers': a new latent or entry is quantised when it is written, and elements are
made of its bytes again when it is read. Both runs of a comparison do so alike.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedModel

from sparse_kvcm import (
    BatchDesc,
    CacheTier,
    CacheTierConfig,
    KvCacheDesc,
    StorageConfig,
    StorageLayout,
)
from sparse_kvcm.deepseek_v4 import DeepseekV4CacheConfig, DeepseekV4CacheManager
from sparse_kvcm.dsa import DsaCacheConfig, DSACacheManagerV2, OffloadSizes
from sparse_kvcm.integrations.transformers import StepDriver
from sparse_kvcm.integrations.transformers.deepseek_v4 import V4StepDriver
from sparse_kvcm.models import DeepSeekV4Geometry, IndexDtype, KvDtype, ModelGeometry, geometry_of

Form = Literal["compact", "scatter"]


@dataclass(frozen=True)
class Sizes:
    """What two runs that are compared have in common.

    Attributes
    ----------
    rows : int
        Requests of a batch.
    max_length : int
        Most tokens of a request, output included.
    kv_dtype, index_dtype, kv_scale
        Records, as in `DsaCacheConfig` and `DeepseekV4CacheConfig`.
    gpu_cache_factor : int
        Cached slots of a lease for each unit of a selection, rounded up to pages.
    form : {"compact", "scatter"}
        As in `StepDriver`.
    """

    rows: int
    max_length: int
    kv_dtype: KvDtype
    index_dtype: IndexDtype
    kv_scale: float
    gpu_cache_factor: int
    form: Form


class Worker(ABC):
    """One run's manager and driver.

    Attributes
    ----------
    driver : StepDriver or V4StepDriver
    lease : int or None
        Units that a request's lease holds, window included; None if everything is resident.
    """

    manager: Any
    driver: Any
    lease: int | None
    tokens_per_unit: int

    def add(self, prompt: Sequence[int], new_tokens: int) -> Any:
        """Run a prompt; its request, which has decoded one token."""
        return self.driver.add(prompt, new_tokens)

    def history(self, request: Any) -> int:
        """Units that the manager has of a request."""
        tokens: int = self.manager.frontier(self._id(request)) or 0
        return tokens // self.tokens_per_unit

    @abstractmethod
    def counts(self) -> tuple[int, int]:
        """Selected units that were in a lease already, and those that were fetched."""

    @abstractmethod
    def _id(self, request: Any) -> int: ...


class DsaWorker(Worker):
    """GLM-5 or DeepSeek-V3.2."""

    tokens_per_unit = 1

    def __init__(self, model: PreTrainedModel, config: DsaCacheConfig, form: Form) -> None:
        self.lease = _lease(config)
        self.manager = DSACacheManagerV2(config)
        self.driver = StepDriver(
            model,
            max_rows=config.max_batch_size,
            max_length=config.max_seq_len,
            manager=self.manager,
            form=form,
        )

    def counts(self) -> tuple[int, int]:
        """See `Worker`."""
        groups = self.driver.statistics()
        return sum(one.hits for one in groups), sum(one.misses for one in groups)

    def _id(self, request: Any) -> int:
        return int(request.cache.request_id)


class V4Worker(Worker):
    """DeepSeek-V4: one step of the manager for all requests, a forward for each of them."""

    tokens_per_unit = 4

    def __init__(self, model: PreTrainedModel, config: DeepseekV4CacheConfig, form: Form) -> None:
        self.lease = _lease(config)
        self.manager = DeepseekV4CacheManager(config)
        self.driver = V4StepDriver(model, self.manager, form=form)
        self._added: list[Any] = []

    def add(self, prompt: Sequence[int], new_tokens: int) -> Any:
        """See `Worker`."""
        self._added.append(super().add(prompt, new_tokens))
        return self._added[-1]

    def counts(self) -> tuple[int, int]:
        """See `Worker`."""
        return sum(one.hits for one in self._added), sum(one.misses for one in self._added)

    def _id(self, request: Any) -> int:
        return int(request.request_id)


CacheConfig = DsaCacheConfig | DeepseekV4CacheConfig


def cache_config(model: PreTrainedModel, sizes: Sizes, *, offload: bool) -> CacheConfig:
    """What the manager of a run is made from.

    Raises
    ------
    InvalidArgument
        For records that the model cannot have, or more tokens than it takes.
    """
    geometry = geometry_of(model.config.to_dict(), "accuracy")
    page = geometry.tokens_per_block
    units = page // geometry.tokens_per_unit
    pages = -(-sizes.max_length // page)
    wanted = OffloadSizes(
        cached_slots=-(-sizes.gpu_cache_factor * geometry.top_k // units) * units,
        host_pages=sizes.rows * pages,
        window_slots=units,
    )
    kind: Any = DeepseekV4CacheConfig if _is_v4(geometry) else DsaCacheConfig
    config: CacheConfig = kind(
        geometry,
        max_batch_size=sizes.rows,
        max_seq_len=sizes.max_length,
        gpu_quota=_quota(geometry, sizes, model.device.type, offload),
        kv_dtype=sizes.kv_dtype,
        index_dtype=sizes.index_dtype,
        kv_scale=sizes.kv_scale,
        tokens_per_block=page,
        max_util_for_resume=1.0,
        device=str(model.device),
        offload=wanted if offload else None,
    )
    return config


def make_worker(model: PreTrainedModel, config: CacheConfig, form: Form) -> Worker:
    """Make the manager and what drives it."""
    if isinstance(config, DeepseekV4CacheConfig):
        return V4Worker(model, config, form)
    return DsaWorker(model, config, form)


def _is_v4(geometry: ModelGeometry) -> bool:
    return isinstance(geometry, DeepSeekV4Geometry)


def _quota(geometry: ModelGeometry, sizes: Sizes, device: str, offload: bool) -> int:
    """Bytes of the pools on the GPU in which the whole batch has room at any length."""
    layers = geometry.dense_layers if offload else geometry.layers
    page, most = geometry.tokens_per_block, sizes.max_length
    # Full histories are largest at the end, windows on the first token of a page.
    lengths = {most, (most - 1) // page * page + 1}
    batches = [BatchDesc([KvCacheDesc(n, n - 1)] * sizes.rows) for n in lengths]
    layout = StorageLayout(
        StorageConfig(
            cache_tiers=[CacheTierConfig(CacheTier.GPU_MEM, 1 << 30)],
            layers=layers(page, sizes.kv_dtype, sizes.index_dtype),
            tokens_per_block=page,
            tokens_per_unit=geometry.tokens_per_unit,
            max_util_for_resume=1.0,
            typical_step=BatchDesc([KvCacheDesc(most, most - 1)] * sizes.rows),
            device="cpu" if device == "cpu" else "cuda",
        )
    )
    needs = [max(slots) for slots in zip(*map(layout.count_slots, batches), strict=True)]
    quota = sum(layout.get_num_bytes(group, slots) for group, slots in enumerate(needs))
    # Pools are divided by the typical step, not by these needs.
    while any(map(operator.lt, layout.slots_for_quota(0, quota), needs)):
        quota += quota // 8
    return quota * 9 // 8  # the manager's granules may be larger


def _lease(config: CacheConfig) -> int | None:
    sizes = config.offload
    return None if sizes is None else sizes.cached_slots + (sizes.window_slots or 0)
