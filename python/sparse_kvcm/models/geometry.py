"""What a model keeps per request: selection groups and layers, in units, tokens and bytes.

A model layer becomes up to three storage layers, since a storage layer has one life cycle: one for
each *part* of what it keeps. Part 0 is what selections choose from, which an offloading worker
keeps on the host; its storage layer has the model layer's own id.

    DSA           0 KEY, 1 INDEX_KEY of layers that own an indexer
    DeepSeek-V4   0 COMPRESS and 1 INDEXER_COMPRESS of ratio 4, 2 SWA of all layers, 3 the
                  compressors' states at ratio 4, 4 COMPRESS and 5 the states at ratio 128
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from sparse_kvcm._core import (
    MAX_CACHED_SLOTS,
    BufferConfig,
    InvalidArgument,
    LayerConfig,
    UnitLayout,
)
from sparse_kvcm.models import _dtypes
from sparse_kvcm.models._dtypes import IndexDtype, KvDtype
from sparse_kvcm.models._fields import FUNCTION, MOST_LAYERS, read_int
from sparse_kvcm.models._ratios import read_ratios
from sparse_kvcm.models.attention_types import (
    BLOCK_SCALE_ROLE,
    COMPRESSOR_STATES,
    INDEXER_STATES,
    STATES,
    AttentionType,
    overlap,
    state_rows,
)
from sparse_kvcm.models.compute import ModelCompute

MAX_TOP_K = MAX_CACHED_SLOTS
_INDEX_KEYS, _WINDOW, _STATES_4, _ENTRIES_128, _STATES_128 = range(1, 6)  # parts


@dataclass(frozen=True)
class ModelGeometry(ABC):
    """The parts of a model's configuration that decide what it keeps.

    Attributes
    ----------
    algorithm : str
        Of its sparse attention, as in the configuration.
    name : str
        Of the preset or the file.
    num_layers : int
        Model layers, without those that only draft (MTP).
    groups : tuple of tuple of int
        Model layers of each selection group, leader (the owner of the indexer) first.
    top_k : int
        Units that one selection names at most.
    tokens_per_unit : int
        Tokens that one unit stands for.
    index_head_dim : int
        Elements of an index key.
    max_seq_len : int
        Longest sequence that the model takes, in tokens.
    compute : ModelCompute, optional
        What a step's time follows from; nothing that is kept does.
    """

    algorithm: ClassVar[str]
    unit_roles: ClassVar[tuple[str, str]] = ("KEY", "KEY_BLOCK_SCALE")
    index_role: ClassVar[str] = "INDEX_KEY"

    name: str
    num_layers: int
    groups: tuple[tuple[int, ...], ...]
    top_k: int
    tokens_per_unit: int
    index_head_dim: int
    max_seq_len: int
    compute: ModelCompute | None = field(default=None, kw_only=True, compare=False)

    @property
    @abstractmethod
    def tokens_per_block(self) -> int:
        """The usual page, in tokens."""

    @abstractmethod
    def unit_layout(self, kv_dtype: KvDtype) -> UnitLayout:
        """Bytes of a unit in one member layer."""

    def region_roles(self, kv_dtype: KvDtype) -> tuple[str, ...]:
        """Roles of a unit's regions where each is a buffer of its own; none if KEY has them all."""
        return self.unit_roles if kv_dtype == "nvfp4" else ()

    def index_layout(self, index_dtype: IndexDtype) -> UnitLayout:
        """Bytes of an index key: data, then scales if it has some."""
        return _dtypes.index_layout(index_dtype, self.index_head_dim)

    @abstractmethod
    def check_page(self, tokens_per_block: int, kv_dtype: KvDtype) -> None:
        """Refuse a page size, in tokens, that this model cannot have."""

    @abstractmethod
    def _dense(self, tokens: int, kv: KvDtype, index: IndexDtype) -> list[LayerConfig]: ...

    @property
    def selection_group_of(self) -> dict[int, int]:
        """The selection group of each layer that attends to a selection."""
        return {layer: i for i, group in enumerate(self.groups) for layer in group}

    @property
    def kv_layer_of(self) -> dict[int, int]:
        """The layer in whose pool each of them finds its units: its own.

        Not to be inferred from `selection_group_of`, nor the other way round: models exist in
        which a layer takes its units from one layer and its selection from another.
        """
        return {layer: layer for layer in self.history_layers}

    def owns_indexer(self, layer: int) -> bool:
        """Whether the layer has an indexer and index keys, or uses another one's selection."""
        return any(group[0] == layer for group in self.groups)

    def index_layer_of(self, layer: int) -> int:
        """The storage layer that has the index keys of a layer with an indexer."""
        return self._layer_id(_INDEX_KEYS, layer)

    @property
    def history_layers(self) -> list[int]:
        """Layers that selections choose from, group by group."""
        return [layer for group in self.groups for layer in group]

    def layers(
        self, tokens_per_block: int, kv_dtype: KvDtype, index_dtype: IndexDtype
    ) -> list[LayerConfig]:
        """Storage layers of a worker that keeps everything on the GPU."""
        return self.sparse_layers(tokens_per_block, kv_dtype, is_sparse=False) + self.dense_layers(
            tokens_per_block, kv_dtype, index_dtype
        )

    def dense_layers(
        self, tokens_per_block: int, kv_dtype: KvDtype, index_dtype: IndexDtype
    ) -> list[LayerConfig]:
        """Storage layers that stay on the GPU of an offloading worker."""
        self.check_page(tokens_per_block, kv_dtype)
        return self._dense(tokens_per_block, kv_dtype, index_dtype)

    def check_resident(
        self, tokens_per_block: int, kv_dtype: KvDtype, index_dtype: IndexDtype
    ) -> None:
        """Refuse a worker that keeps everything on the GPU, and whose regions would come apart.

        Regions that are buffers of their own have one page index. Buffers of one size share a pool,
        and with a third one in the pool of either its indices would be others.
        """
        if not self.region_roles(kv_dtype):
            return
        units = self.sparse_layers(tokens_per_block, kv_dtype, is_sparse=False)
        regions = {one.page_bytes: one.role for layer in units for one in layer.buffers}
        for layer in self.dense_layers(tokens_per_block, kv_dtype, index_dtype):
            for other in layer.buffers:
                if layer.sliding_window_size is None and other.page_bytes in regions:
                    raise InvalidArgument(
                        f"[{FUNCTION}] kv_dtype and index_dtype must keep "
                        f"{regions[other.page_bytes]} and {other.role} in pages of two sizes where "
                        f"both are on the GPU, got {kv_dtype} and {index_dtype}, "
                        f"{other.page_bytes} B each; take another of either, or offload"
                    )

    def sparse_layers(
        self, tokens_per_block: int, kv_dtype: KvDtype, *, is_sparse: bool = True
    ) -> list[LayerConfig]:
        """Storage layers that selections choose from, as the engine's manager calls them."""
        self.check_page(tokens_per_block, kv_dtype)
        units = tokens_per_block // self.tokens_per_unit
        layout = self.unit_layout(kv_dtype)
        roles = (self.region_roles(kv_dtype) or ("KEY",)) if is_sparse else self.unit_roles
        pages = {roles[0]: layout.page_bytes(units)}
        if kv_dtype == "nvfp4":  # scales are a buffer of their own
            pages = {
                role: size * units for role, size in zip(roles, layout.region_bytes, strict=True)
            }
        buffers = [BufferConfig(role, size, is_sparse=is_sparse) for role, size in pages.items()]
        return [LayerConfig(layer, buffers) for layer in self.history_layers]

    def _index_layers(self, tokens: int, index: IndexDtype) -> list[LayerConfig]:
        page = self.index_layout(index).page_bytes(tokens // self.tokens_per_unit)
        return [
            self._storage_layer(_INDEX_KEYS, group[0], {self.index_role: page})
            for group in self.groups
        ]

    def _storage_layer(
        self, part: int, layer: int, page_bytes: Mapping[str, int], window: int | None = None
    ) -> LayerConfig:
        buffers = [BufferConfig(role, size) for role, size in page_bytes.items()]
        return LayerConfig(self._layer_id(part, layer), buffers, window)

    def _layer_id(self, part: int, layer: int) -> int:
        return part * self.num_layers + layer


@dataclass(frozen=True)
class DsaGeometry(ModelGeometry):
    """DeepSeek-V3.2 and GLM-5.x: each layer selects tokens out of its MLA latents.

    Attributes
    ----------
    kv_lora_rank, qk_rope_head_dim : int
        Elements of a latent: compressed ones, then rotary ones.
    index_n_heads : int
        Query heads of an indexer.
    """

    algorithm: ClassVar[str] = "dsa"

    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    index_n_heads: int = 64

    @property
    def tokens_per_block(self) -> int:
        """The page of FlashMLA and DeepGEMM."""
        return 64

    def unit_layout(self, kv_dtype: KvDtype) -> UnitLayout:
        """The record of one latent."""
        return _dtypes.latent_layout(kv_dtype, self.kv_lora_rank, self.qk_rope_head_dim)

    def check_page(self, tokens_per_block: int, kv_dtype: KvDtype) -> None:
        """FlashMLA's records have pages of 64."""
        if kv_dtype == "fp8_ds_mla" and tokens_per_block != 64:
            raise InvalidArgument(
                f"[{FUNCTION}] tokens_per_block must be 64 with kv_dtype fp8_ds_mla, whose kernels "
                f"have that page, got {tokens_per_block}; bf16, fp8 and nvfp4 take other pages"
            )

    def _dense(self, tokens: int, kv: KvDtype, index: IndexDtype) -> list[LayerConfig]:
        del kv
        return self._index_layers(tokens, index)

    @classmethod
    def from_config(cls, name: str, config: Mapping[str, Any]) -> DsaGeometry:
        """Read a ``deepseek_v32`` or ``glm_moe_dsa`` configuration."""
        num_layers = read_int(config, "num_hidden_layers", most=MOST_LAYERS)
        groups: list[list[int]] = []
        for layer, is_full in enumerate(_full_indexers(config, num_layers)):
            if is_full:
                groups.append([])
            elif not groups:
                raise InvalidArgument(f"[{FUNCTION}] layer 0 must own an indexer, got shared")
            groups[-1].append(layer)
        return cls(
            name,
            num_layers,
            tuple(map(tuple, groups)),
            read_int(config, "index_topk", most=MAX_TOP_K),
            1,
            read_int(config, "index_head_dim", 128),
            read_int(config, "max_position_embeddings"),
            read_int(config, "kv_lora_rank"),
            read_int(config, "qk_rope_head_dim"),
            read_int(config, "index_n_heads", _INDEX_N_HEADS.get(str(config.get("model_type")))),
            compute=ModelCompute.from_config(config),
        )


# What transformers 5.24 takes where config.json has none.
_INDEX_N_HEADS = {"deepseek_v32": 64, "glm_moe_dsa": 32}


def _full_indexers(config: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Which layers own an indexer: by list, else by pattern, else by frequency and offset."""
    for name, names in (("indexer_types", ("full", "shared")), ("index_topk_pattern", "FS")):
        kinds = config.get(name)
        if kinds is None:
            continue
        if not isinstance(kinds, list | str) or any(kind not in names for kind in kinds):
            raise InvalidArgument(
                f"[{FUNCTION}] {name} must be made of {' and '.join(names)}, got {kinds!r}"
            )
        if len(kinds) < num_layers:
            raise InvalidArgument(
                f"[{FUNCTION}] {name} must name {num_layers} layers, got {len(kinds)}"
            )
        return [kind == names[0] for kind in kinds[:num_layers]]
    frequency = read_int(config, "index_topk_freq", 1)
    offset = read_int(config, "index_skip_topk_offset", 2, least=0)
    return [max(i - offset + 1, 0) % frequency == 0 for i in range(num_layers)]


@dataclass(frozen=True)
class DeepSeekV4Geometry(ModelGeometry):
    """DeepSeek-V4: windows, entries of 4 tokens that are selected, entries of 128 that are not."""

    algorithm: ClassVar[str] = "deepseek_v4"
    unit_roles: ClassVar[tuple[str, str]] = (AttentionType.COMPRESS.role, BLOCK_SCALE_ROLE)
    index_role: ClassVar[str] = AttentionType.INDEXER_COMPRESS.role

    head_dim: int = 512
    qk_rope_head_dim: int = 64
    sliding_window: int = 128
    compress_ratios: tuple[int, ...] = ()

    @property
    def tokens_per_block(self) -> int:
        """The least page that has a whole entry of ratio 128."""
        return 128

    def unit_layout(self, kv_dtype: KvDtype) -> UnitLayout:
        """The record of one compressed entry."""
        return _dtypes.compressed_layout(kv_dtype, self.head_dim, self.qk_rope_head_dim)

    def check_page(self, tokens_per_block: int, kv_dtype: KvDtype) -> None:
        """Whole entries of ratio 128."""
        del kv_dtype
        if tokens_per_block < 128 or tokens_per_block % 128 != 0:
            raise InvalidArgument(
                f"[{FUNCTION}] tokens_per_block must be a multiple of 128, got {tokens_per_block}"
            )

    def window_layout(self, kv_dtype: KvDtype) -> UnitLayout:
        """The record of a window's token, and of an entry of ratio 128."""
        return self.unit_layout(_dtypes.window_dtype(kv_dtype))

    def state_width(self, kind: AttentionType, ratio: int) -> int:
        """Elements of one input of a compressor."""
        indexes = kind in INDEXER_STATES
        return overlap(ratio) * (self.index_head_dim if indexes else self.head_dim)

    def storage_layer_of(self, kind: AttentionType, layer: int) -> int:
        """The storage layer that has a model layer's cache of this kind."""
        ratio = self.compress_ratios[layer]
        if kind is AttentionType.SWA:
            part = _WINDOW
        elif kind.is_state:
            part = _STATES_4 if ratio == 4 else _STATES_128
        elif kind is AttentionType.INDEXER_COMPRESS:
            part = _INDEX_KEYS
        else:
            part = 0 if ratio == 4 else _ENTRIES_128
        return self._layer_id(part, layer)

    def layers_of(self, ratio: int) -> list[int]:
        """Model layers of one compress ratio."""
        return [i for i, one in enumerate(self.compress_ratios) if one == ratio]

    def _dense(self, tokens: int, kv: KvDtype, index: IndexDtype) -> list[LayerConfig]:
        entry = self.window_layout(kv)
        layers = self._index_layers(tokens, index)
        for layer, ratio in enumerate(self.compress_ratios):
            window = {AttentionType.SWA.role: entry.page_bytes(tokens)}
            layers.append(self._storage_layer(_WINDOW, layer, window, self.sliding_window))
            # The compressor reads its last 2 x 4 or 128 inputs, so a page keeps a ring of as many.
            # Groups of 128 begin with a page: they need no other.
            if ratio == 4:
                states = self._state_pages(STATES, ratio)
                layers.append(self._storage_layer(_STATES_4, layer, states, state_rows(ratio)))
            elif ratio == 128:
                page = {AttentionType.COMPRESS.role: entry.page_bytes(tokens // 128)}
                layers.append(self._storage_layer(_ENTRIES_128, layer, page))
                layers.append(
                    self._storage_layer(
                        _STATES_128, layer, self._state_pages(COMPRESSOR_STATES, ratio), 1
                    )
                )
        return layers

    def _state_pages(self, kinds: tuple[AttentionType, ...], ratio: int) -> dict[str, int]:
        rows = state_rows(ratio)
        return {kind.role: rows * self.state_width(kind, ratio) * 4 for kind in kinds}

    @classmethod
    def from_config(cls, name: str, config: Mapping[str, Any]) -> DeepSeekV4Geometry:
        """Read a ``deepseek_v4`` configuration; ratios past its layers belong to MTP layers."""
        num_layers = read_int(config, "num_hidden_layers", most=MOST_LAYERS)
        ratios = read_ratios(config, num_layers)
        groups = tuple((layer,) for layer, ratio in enumerate(ratios) if ratio == 4)
        if not groups:
            raise InvalidArgument(f"[{FUNCTION}] compress_ratios must have a 4, got {ratios}")
        head_dim = read_int(config, "head_dim", 512)
        return cls(
            name,
            num_layers,
            groups,
            read_int(config, "index_topk", most=MAX_TOP_K),
            4,
            read_int(config, "index_head_dim", 128),
            read_int(config, "max_position_embeddings"),
            head_dim,
            read_int(config, "qk_rope_head_dim", 64, most=head_dim),
            read_int(config, "sliding_window", 128),
            ratios,
            compute=ModelCompute.from_config(config),
        )
