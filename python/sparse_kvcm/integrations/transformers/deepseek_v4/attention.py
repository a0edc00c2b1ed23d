"""Form "triton" of a DeepSeek-V4: its decode attention over entries where they lie, by Triton.

A registered attention function, since stock layers attend to tensors that they put together. In a
decode step of a cache of this form it looks at none of them: window and entries are read from the
manager's pages, where the cache's layers have written the new ones. Everything else, prompts above
all, is stock "eager".
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.models.deepseek_v4.modeling_deepseek_v4 import eager_attention_forward

from sparse_kvcm.attention import KeyPart, attention_base, sparse_mla_decode, step_rows
from sparse_kvcm.integrations.transformers.absorbed import tuning_on
from sparse_kvcm.models import AttentionType

if TYPE_CHECKING:
    from sparse_kvcm.integrations.transformers.deepseek_v4.state import V4State

# The name under which models select it.
IMPLEMENTATION = "sparse_kvcm_v4"
# Of the forward at hand, if it is a decode step of a cache of this form.
current: ContextVar[V4State | None] = ContextVar("sparse_kvcm_v4_state", default=None)


def register() -> None:
    """Register the attention and mask functions under ``IMPLEMENTATION``. May be repeated."""
    AttentionInterface.register(IMPLEMENTATION, attention)
    AttentionMaskInterface.register(IMPLEMENTATION, eager_mask)


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend as transformers' attention functions do."""
    state = current.get()
    if state is None:
        output: tuple[torch.Tensor, torch.Tensor] = eager_attention_forward(
            module, query, key, value, attention_mask, scaling, dropout, **kwargs
        )
        return output
    return attend(state, module, query, scaling), None


def attend(state: V4State, module: Any, query: torch.Tensor, scaling: float) -> torch.Tensor:
    """One layer of a decode step.

    Parameters
    ----------
    state : V4State
        Whose layers have written the step's new tokens and entries.
    module : nn.Module
        The attention layer.
    query : torch.Tensor, BF16, shape (b, h, 1, d)
    scaling : float

    Returns
    -------
    torch.Tensor, BF16, shape (b, 1, h, d)
    """
    manager, layer = state.manager, int(module.layer_idx)
    scale = manager.config.kv_scale
    rows = step_rows(manager, layer, state.slots.pop(layer, None), at=state.at)
    base = attention_base(manager, layer, AttentionType.SWA)
    part = KeyPart(base.buffers, rows.window, base.layout, scale)
    window: KeyPart | None = None
    if rows.compressed.shape[1]:
        base, window = attention_base(manager, layer), part
        part = KeyPart(base.buffers, rows.compressed, base.layout, scale)
    output, _ = sparse_mla_decode(
        query[:, :, 0].contiguous(),
        part.pool,
        part.rows,
        layout=part.layout,
        kv_scale=scale,
        softmax_scale=scaling,
        sinks=module.sinks.float(),
        window=window,
        tuning=tuning_on(query.device),
    )
    return output[:, None]
