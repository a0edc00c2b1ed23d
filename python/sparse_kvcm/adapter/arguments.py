"""Arrays and fields that managers are handed, refused by function, name, bound and value.

Nothing here asks a tensor for a value, so that a forward which is checked can be captured.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from sparse_kvcm._core import MAX_PAGE_TOKENS, MAX_ROWS, InvalidArgument
from sparse_kvcm.adapter.store import check_int
from sparse_kvcm.models import ModelGeometry

if TYPE_CHECKING:
    import torch


def check_tensor(
    function: str,
    name: str,
    values: object,
    shape: Sequence[int | str],
    dtypes: Collection[torch.dtype] | None = None,
    device: str | None = None,
) -> torch.Tensor:
    """Refuse another shape, type or device.

    Parameters
    ----------
    function, name : str
    values : torch.Tensor
    shape : sequence
        Of each dimension its size, or a name where any will do.
    dtypes : collection of torch.dtype, optional
        None: any real floating type.
    device : str, optional
        Where it must lie; None: anywhere.
    """
    import torch

    if not isinstance(values, torch.Tensor) or values.layout is not torch.strided:
        kind = getattr(values, "layout", type(values).__name__)
        raise InvalidArgument(f"[{function}] {name} must be a dense torch.Tensor, got {kind}")
    wanted = "float" if dtypes is None else " or ".join(str(one)[6:] for one in dtypes)
    right = values.is_floating_point() if dtypes is None else values.dtype in dtypes
    if not right:
        raise InvalidArgument(f"[{function}] {name} must be {wanted}, got {values.dtype}")
    pairs = zip(shape, values.shape, strict=False)
    if values.ndim != len(shape) or any(a != b for a, b in pairs if isinstance(a, int)):
        raise InvalidArgument(
            f"[{function}] {name} must be ({', '.join(map(str, shape))}), got {tuple(values.shape)}"
        )
    where = values.device.type
    if where == "meta" or (device is not None and where != torch.device(device).type):
        raise InvalidArgument(f"[{function}] {name} must be on {device or 'a device'}, got {where}")
    return values


def check_fields(function: str, config: Any, kind: type[ModelGeometry]) -> None:
    """Refuse fields that the configurations of all models' managers have, and that cannot be.

    Each by itself: what they must be together, and for the model, is checked where it is known.

    Parameters
    ----------
    function : str
    config : dataclass
    kind : type
        Of its geometry.
    """
    if not isinstance(config.geometry, kind):
        raise InvalidArgument(
            f"[{function}] geometry must be a {kind.__name__}, got {config.geometry!r:.40}"
        )
    check_int(function, "max_batch_size", config.max_batch_size, 1, MAX_ROWS)
    check_int(function, "max_seq_len", config.max_seq_len)
    if not 1 <= config.max_seq_len <= config.geometry.max_seq_len:
        raise InvalidArgument(
            f"[{function}] max_seq_len must be in [1, {config.geometry.max_seq_len}], what "
            f"{config.geometry.name} takes, got {config.max_seq_len}"
        )
    check_int(function, "gpu_quota", config.gpu_quota, 1)
    if config.tokens_per_block is not None:
        check_int(function, "tokens_per_block", config.tokens_per_block, 1, MAX_PAGE_TOKENS)
    for field in ("kv_dtype", "index_dtype", "device"):
        if not isinstance(getattr(config, field), str):
            raise InvalidArgument(
                f"[{function}] {field} must be a str, got {getattr(config, field)!r}"
            )
    config.geometry.unit_layout(config.kv_dtype)
    config.geometry.index_layout(config.index_dtype)
    if config.index_scale not in ("fp32", "ue8m0"):
        raise InvalidArgument(
            f"[{function}] index_scale must be fp32 or ue8m0, got {config.index_scale!r}"
        )
    scale = config.kv_scale
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale < math.inf:
        raise InvalidArgument(f"[{function}] kv_scale must be a finite float > 0, got {scale!r}")
