"""The registered attention and mask functions: attention over the units that were selected."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.masking_utils import (
    AttentionMaskInterface,
    causal_mask_function,
    eager_mask,
)

from sparse_kvcm.integrations.transformers import forward as _forward

# The name under which models select these functions.
IMPLEMENTATION = "sparse_kvcm"


def register() -> None:
    """Register the attention and mask functions under ``IMPLEMENTATION``. May be repeated."""
    AttentionInterface.register(IMPLEMENTATION, attention)
    AttentionMaskInterface.register(IMPLEMENTATION, mask)


def mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Any = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Make a forward pass's additive mask, which the indexer needs whole, and note its padding.

    The arguments are those of transformers' mask functions.
    """
    _forward.current.set(
        _forward.Forward(
            batch_size=batch_size,
            query_length=q_length,
            kv_length=kv_length,
            is_causal=mask_function is causal_mask_function,
            attention_mask=attention_mask,
        )
    )
    return eager_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        mask_function=mask_function,
        attention_mask=attention_mask,
        **kwargs,
    )


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    dropout: float = 0.0,
    indices: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend to the selected units: live rows in a prompt's forward, arena slots in a decode step.

    The arguments are those of transformers' attention functions; ``indices``, int32 ``[b, s, k]``,
    holds the selected positions.
    """
    forward = _forward.current.get()
    state = forward.state if forward is not None else None
    if state is None:
        raise ValueError(
            f"[{IMPLEMENTATION} attention] the forward pass must have an OffloadedCache as its "
            "cache, got another cache or none. Pass cache=OffloadedCache(model, ...), or choose "
            'another implementation with model.set_attn_implementation("eager")'
        )
    if indices is None:
        raise ValueError(f"[{IMPLEMENTATION} attention] the layer gave no selection")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    output: tuple[torch.Tensor, torch.Tensor | None]
    if state.is_prompt:
        output = attend(query, key, value, only(attention_mask, indices), scaling, dropout, module)
    elif state.form == "triton":
        output = state.attend(module, layer, query, indices[:, 0], scaling), None
    else:
        key, value, attention_mask = state.read(module, layer, attention_mask, indices[:, 0])
        output = attend(query, key, value, attention_mask, scaling, dropout, module)
    state.attended(layer)
    return output


def only(attention_mask: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Mask out every position that ``indices`` does not name."""
    unselected = torch.ones(
        attention_mask.shape[0], *attention_mask.shape[2:], dtype=torch.bool, device=indices.device
    ).scatter(-1, indices.long(), False)
    minimum = torch.finfo(attention_mask.dtype).min
    return attention_mask.masked_fill(unselected.unsqueeze(1), minimum)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    dropout: float,
    module: nn.Module,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute softmax attention as transformers' eager form does, operation for operation.

    Shapes are query ``[b, h, s, d_qk]``, key ``[b, h, t, d_qk]``, value ``[b, h, t, d_v]``; the
    outputs are ``[b, s, h, d_v]`` and the weights.
    """
    weights = torch.matmul(query, key.transpose(2, 3)) * scaling + attention_mask
    weights = nn.functional.softmax(weights, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights
