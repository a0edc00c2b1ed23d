"""Which layers of a DeepSeek-V4 compress their history, and how much."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparse_kvcm._core import InvalidArgument
from sparse_kvcm.models._fields import FUNCTION, read_ints

# What transformers makes of the ratios of a checkpoint's config.json.
_LAYER_TYPES = {
    "sliding_attention": 0,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}


def read_ratios(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Read the ratio of each layer: ``compress_ratios``, else ``layer_types`` with their rates.

    What is past the layers belongs to MTP layers, which only draft.
    """
    if config.get("compress_ratios") is None and config.get("layer_types") is not None:
        return _of_types(config, num_layers)
    ratios = tuple(read_ints(config, "compress_ratios"))
    if len(ratios) < num_layers or not {0, 1, 4, 128}.issuperset(ratios):
        raise InvalidArgument(
            f"[{FUNCTION}] compress_ratios must have {num_layers} of 0, 1, 4 and 128, "
            f"got {list(ratios)}"
        )
    return ratios[:num_layers]


def _of_types(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    types = config["layer_types"]
    if (
        not isinstance(types, list)
        or len(types) < num_layers
        or any(kind not in _LAYER_TYPES for kind in types)
    ):
        raise InvalidArgument(
            f"[{FUNCTION}] layer_types must have {num_layers} of {', '.join(_LAYER_TYPES)}, "
            f"got {types!r}"
        )
    rates = config.get("compress_rates") or {}
    for kind, ratio in _LAYER_TYPES.items():
        if ratio and rates.get(kind, ratio) != ratio:
            raise InvalidArgument(
                f"[{FUNCTION}] compress_rates must be {ratio} for {kind}, got {rates[kind]!r}"
            )
    return tuple(_LAYER_TYPES[kind] for kind in types[:num_layers])
