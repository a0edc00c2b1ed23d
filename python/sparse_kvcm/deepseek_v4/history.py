"""What a request brings with it when it was computed elsewhere, and what of it goes where."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sparse_kvcm._core import InvalidArgument
from sparse_kvcm.models import AttentionType, DeepSeekV4Geometry
from sparse_kvcm.models.attention_types import types_of_ratio

if TYPE_CHECKING:
    import torch

Key = tuple[int, AttentionType]


@dataclass(frozen=True)
class DeepseekV4History:
    """A prompt, or a received transfer.

    Attributes
    ----------
    tokens : int
        How many it has.
    items : dict of (int, AttentionType) to torch.Tensor, float, shape (m, width)
        By layer and type. Windows: the newest tokens, at least those that the next one reads,
        ``min(tokens, window - 1)``. States: the newest inputs of a compressor, all that its next
        entry needs (`least_inputs`). COMPRESS and INDEXER_COMPRESS: all whole entries.
    """

    tokens: int
    items: Mapping[Key, torch.Tensor] = field(default_factory=dict)


def least_inputs(tokens: int, ratio: int) -> int:
    """Newest inputs that the entries still to come are made of."""
    begun = tokens % ratio
    return begun + min(ratio, tokens - begun) if ratio == 4 else begun


def types_of(geometry: DeepSeekV4Geometry) -> Iterable[Key]:
    """Every layer with each of its types."""
    for layer, ratio in enumerate(geometry.compress_ratios):
        for kind in types_of_ratio(ratio):
            yield layer, kind


def check_has(function: str, geometry: DeepSeekV4Geometry, layer: int, kind: AttentionType) -> None:
    """Refuse a layer that is not there, or does not keep the type.

    Raises
    ------
    InvalidArgument
        Naming the layers that do.
    """
    ratios = geometry.compress_ratios
    if not 0 <= layer < len(ratios) or kind not in types_of_ratio(ratios[layer]):
        has = [one for one, other in types_of(geometry) if other is kind]
        raise InvalidArgument(
            f"[{function}] layer must be one with {kind.name}, of {has}, got {layer}"
        )


def width_of(geometry: DeepSeekV4Geometry, layer: int, kind: AttentionType) -> int:
    """Elements of one item."""
    if kind.is_state:
        return geometry.state_width(kind, geometry.compress_ratios[layer])
    indexes = kind is AttentionType.INDEXER_COMPRESS
    return geometry.index_head_dim if indexes else geometry.head_dim


def first_item(tokens: int, ratio: int, kind: AttentionType, count: int) -> int:
    """The first of the newest `count` items."""
    per_token = 1 if kind is AttentionType.SWA or kind.is_state else ratio
    return tokens // per_token - count
