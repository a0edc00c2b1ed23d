"""From the configuration of a transformers model to what the manager stores."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

import sparse_kvcm as kvcm
from sparse_kvcm.dsa import DsaManager
from sparse_kvcm.integrations.transformers._arguments import check_int, check_model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

MODEL_TYPES = ("glm_moe_dsa", "deepseek_v32")
DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class DsaGeometry:
    """Selection groups and latent sizes of a DSA model.

    Attributes
    ----------
    groups : tuple of tuple of int
        Layer indices of each selection group, leader (the layer with the indexer) first.
    top_k : int
        Units that one selection names at most.
    kv_lora_rank, qk_rope_head_dim : int
        Elements of the two parts of a latent.
    dtype : torch.dtype
        Of the latents.
    """

    groups: tuple[tuple[int, ...], ...]
    top_k: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    dtype: torch.dtype

    @property
    def width(self) -> int:
        """Elements of one latent."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def unit_bytes(self) -> int:
        """Bytes of one latent in one layer."""
        return self.width * self.dtype.itemsize

    @property
    def num_layers(self) -> int:
        """Layers of all groups together."""
        return sum(len(group) for group in self.groups)

    @cached_property
    def group_of_layer(self) -> tuple[int, ...]:
        """The selection group of each layer."""
        return tuple(index for index, group in enumerate(self.groups) for _ in group)

    @classmethod
    def from_config(cls, config: PreTrainedConfig, dtype: torch.dtype) -> DsaGeometry:
        """Read the geometry off a model's configuration.

        Parameters
        ----------
        config : PreTrainedConfig
            Of a ``glm_moe_dsa`` or ``deepseek_v32`` model.
        dtype : torch.dtype
            Of the latents that the model computes, ``float32`` or ``bfloat16``.

        Raises
        ------
        NotImplementedError
            For another model type, another kind of layer or another dtype.
        ValueError
            If the first layer has no indexer.
        """
        if config.model_type not in MODEL_TYPES:
            raise NotImplementedError(
                f"[DsaGeometry] model type must be one of {', '.join(MODEL_TYPES)}, "
                f"got {config.model_type}"
            )
        if dtype not in DTYPES:
            raise NotImplementedError(
                f"[DsaGeometry] dtype must be one of {', '.join(map(str, DTYPES))}, got {dtype}"
            )
        foreign = sorted({kind for kind in config.layer_types if kind != "indexed_attention"})
        if foreign:
            raise NotImplementedError(
                "[DsaGeometry] every layer must be of type indexed_attention, got also "
                + ", ".join(foreign)
            )
        # DeepSeek-V3.2 has no such list: each of its layers owns an indexer.
        kinds = getattr(config, "indexer_types", None) or ["full"] * config.num_hidden_layers
        if kinds[0] != "full":
            raise ValueError("[DsaGeometry] layer 0 must own an indexer, got indexer type shared")
        groups: list[list[int]] = []
        for layer, kind in enumerate(kinds):
            if kind == "full":
                groups.append([])
            groups[-1].append(layer)
        return cls(
            groups=tuple(map(tuple, groups)),
            top_k=config.index_topk,
            kv_lora_rank=config.kv_lora_rank,
            qk_rope_head_dim=config.qk_rope_head_dim,
            dtype=dtype,
        )

    def check_manager(self, manager: kvcm.KvCacheManager) -> None:
        """Check that a manager stores exactly this.

        Raises
        ------
        ValueError
            Naming the first difference.
        """
        config = manager.config
        layers = tuple(tuple(group.layers) for group in config.groups)
        if layers != self.groups:
            raise ValueError(
                f"[DsaGeometry] the manager's groups must be {self.groups}, got {layers}"
            )
        if config.tokens_per_unit != 1:
            raise ValueError(
                f"[DsaGeometry] tokens_per_unit must be 1, got {config.tokens_per_unit}"
            )
        for index, group in enumerate(config.groups):
            if list(group.layout.region_bytes) != [self.unit_bytes]:
                raise ValueError(
                    f"[DsaGeometry] region_bytes of group {index} must be [{self.unit_bytes}], "
                    f"got {list(group.layout.region_bytes)}"
                )
            if group.layout.page_bytes(config.units_per_page) % self.unit_bytes:
                raise ValueError(
                    f"[DsaGeometry] page_alignment of group {index} must divide the page, "
                    f"got {group.layout.page_alignment}"
                )
            if group.top_k < self.top_k:
                raise ValueError(
                    f"[DsaGeometry] top_k of group {index} must be >= {self.top_k}, "
                    f"got {group.top_k}"
                )


def manager_config(
    model: PreTrainedModel,
    *,
    max_rows: int,
    max_length: int,
    max_requests: int | None = None,
    cached_slots: int | None = None,
    window_slots: int | None = None,
    arena_pages: int | None = None,
    tokens_per_block: int = 64,
) -> kvcm.KvCacheManagerConfig:
    """Size a manager for a model.

    Parameters
    ----------
    model : PreTrainedModel
        A GLM-5 or DeepSeek-V3.2 model, on the device that shall hold the leases.
    max_rows : int
        Requests that decode at a time; each gets a lease.
    max_length : int
        Most tokens of one request, prompt and output.
    max_requests : int, optional
        Requests whose history the host holds at a time, suspended ones included.
        Default ``max_rows``.
    cached_slots : int, optional
        N, a multiple of ``tokens_per_block``. Default twice the model's top-k, rounded up.
    window_slots : int, optional
        W, a multiple of ``tokens_per_block``. Default one page.
    arena_pages : int, optional
        Pages of all leases together. Default ``max_rows`` leases of N + W. Requests shorter than
        that take smaller leases, which can leave gaps: give a few pages more where they mix.
    tokens_per_block : int
        Tokens of one page.

    Returns
    -------
    KvCacheManagerConfig
        With one selection group per indexer and one region per latent.

    Raises
    ------
    ValueError
        For a size that is not an int or below 1.
    """
    check_model("manager_config", model)
    sizes = {
        "max_rows": max_rows,
        "max_length": max_length,
        "max_requests": max_requests,
        "cached_slots": cached_slots,
        "window_slots": window_slots,
        "arena_pages": arena_pages,
        "tokens_per_block": tokens_per_block,
    }
    for name, value in sizes.items():
        if value is not None:
            check_int("manager_config", name, value)
    geometry = DsaGeometry.from_config(model.config, model.dtype)
    page = tokens_per_block
    if cached_slots is None:
        cached_slots = _pages(2 * geometry.top_k, page) * page
    if window_slots is None:
        window_slots = page
    if arena_pages is None:
        arena_pages = max_rows * _pages(cached_slots + window_slots, page)
    if max_requests is None:
        max_requests = max_rows
    layout = kvcm.UnitLayout([geometry.unit_bytes])
    device = model.device
    return kvcm.KvCacheManagerConfig(
        groups=[
            kvcm.SelectionGroupConfig(list(layers), geometry.top_k, layout)
            for layers in geometry.groups
        ],
        cached_slots=cached_slots,
        window_slots=window_slots,
        arena_pages=arena_pages,
        host_pages=max_requests * _pages(max_length, page),
        max_leases=max_rows,
        tokens_per_block=tokens_per_block,
        device="cpu" if device.type == "cpu" else f"{device.type}:{device.index or 0}",
    )


def manager_for(
    function: str,
    model: PreTrainedModel,
    manager: kvcm.KvCacheManager | DsaManager | None,
    *,
    max_rows: int,
    max_length: int,
    **options: int | None,
) -> kvcm.KvCacheManager | DsaManager:
    """Check the manager that ``function`` was given, or make one with the options that are set.

    Raises
    ------
    ValueError
        If it is no manager, or if options that it has settled are set too.
    """
    check_int(function, "max_rows", max_rows)
    check_int(function, "max_length", max_length)
    given = {name: value for name, value in options.items() if value is not None}
    if manager is None:
        return kvcm.KvCacheManager(
            manager_config(model, max_rows=max_rows, max_length=max_length, **given)
        )
    if not isinstance(manager, kvcm.KvCacheManager | DsaManager):
        raise ValueError(
            f"[{function}] manager must be a KvCacheManager or a DsaManager, got "
            f"{type(manager).__name__} {manager}"
        )
    if given:
        name, value = next(iter(given.items()))
        raise ValueError(
            f"[{function}] {name} must be left out where a manager is given, got {value}. Set it "
            "in the manager's configuration"
        )
    return manager


def _pages(units: int, page: int) -> int:
    return -(-units // page)
