"""What the hooks of one forward pass tell each other.

The hooks see different things: the mask function the padding, the cache the new latents, the
attention function the queries and the selection. In one forward pass they are called in this order
and on one thread, so a context variable joins them: the mask function starts a `Forward`, the first
layer's cache binds itself to it, and each layer's attention finds that cache there.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sparse_kvcm.integrations.transformers.state import CacheState


@dataclass(eq=False)
class Forward:
    """One forward pass, as the mask function saw it.

    Attributes
    ----------
    batch_size, query_length, kv_length : int
        Shape of the mask.
    is_causal : bool
        False if the mask is anything but causal with padding.
    attention_mask : torch.Tensor or None
        The user's 2-D mask, bool ``[b, kv_length]``; None if all positions count.
    state : CacheState or None
        Of the offloaded cache, once its first layer has been updated.
    """

    batch_size: int
    query_length: int
    kv_length: int
    is_causal: bool
    attention_mask: torch.Tensor | None
    state: CacheState | None = None


current: ContextVar[Forward | None] = ContextVar("sparse_kvcm_forward", default=None)


def left_padding(forward: Forward, device: torch.device) -> torch.Tensor:
    """Padding positions in front of each row.

    Returns
    -------
    torch.Tensor
        int64 ``[b]``.

    Raises
    ------
    ValueError
        For right padding, holes, an empty row, or a mask of another length.
    NotImplementedError
        For a mask that is not causal.
    """
    if not forward.is_causal:
        raise NotImplementedError(
            "[OffloadedCache] the mask must be causal; packed sequences and custom masks are not "
            "supported"
        )
    mask = forward.attention_mask
    if mask is None:
        return torch.zeros(forward.batch_size, dtype=torch.int64, device=device)
    expected = (forward.batch_size, forward.kv_length)
    if tuple(mask.shape) != expected:
        raise ValueError(
            f"[OffloadedCache] attention_mask must have shape {expected}, past tokens included, "
            f"got {tuple(mask.shape)}. Past tokens must not be computed again, as with "
            "use_cache=False"
        )
    padding = (~mask).sum(-1)
    positions = torch.arange(forward.kv_length, device=mask.device)
    if not torch.equal(mask, positions >= padding[:, None]):
        raise ValueError(
            "[OffloadedCache] padding must be on the left; right padding and holes in "
            "attention_mask are not supported"
        )
    empty = (~mask[:, -1]).nonzero()
    if len(empty):
        raise ValueError(
            "[OffloadedCache] attention_mask must have at least one token in each row, got none in "
            f"row {int(empty[0])}. Chunks of a prompt, as with prefill_chunk_size, are not "
            "supported"
        )
    return padding
