"""Forward hooks that join a stock DeepSeek-V4 and a managed cache.

    decoder, before    the cache's forward begins: a step of the manager is opened
    indexer, after     the cache layer notes the selection
    compressor, after  the cache layer gives the selected entries
    decoder, after     the forward ends: its tokens are committed, or the prompt imported

They look at the cache of each forward and leave forwards with other caches alone, so a model with
hooks still is a stock model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4CSACompressor,
    DeepseekV4Indexer,
)

from sparse_kvcm.integrations.transformers.deepseek_v4.attention import current
from sparse_kvcm.integrations.transformers.deepseek_v4.cache import ManagedV4Cache, decoder_of
from sparse_kvcm.integrations.transformers.deepseek_v4.layers import ManagedCSA

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CACHE, _LAYER = 3, 4  # places in the arguments of a compressor and of an indexer


@contextmanager
def attach(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Put the hooks on a model, for as long as the context lasts.

    Parameters
    ----------
    model : PreTrainedModel
        A ``DeepseekV4ForCausalLM`` or ``DeepseekV4Model``, of any weights, attention "eager" or
        "sparse_kvcm_v4".

    Raises
    ------
    ValueError
        If it has no indexer of a DeepSeek-V4.
    """
    decoder = decoder_of(model)
    handles = [
        decoder.register_forward_pre_hook(_begin, with_kwargs=True),
        decoder.register_forward_hook(_end, with_kwargs=True),
    ]
    found = False
    for module in decoder.modules():
        if isinstance(module, DeepseekV4Indexer):
            found = True
            handles.append(module.register_forward_hook(_selected))
        elif isinstance(module, DeepseekV4CSACompressor):
            handles.append(module.register_forward_hook(_attend))
    try:
        if not found:
            raise ValueError(
                f"[attach] model must be a DeepSeek-V4 with an indexer, got {type(model).__name__}"
            )
        yield model
    finally:
        current.set(None)
        for handle in handles:
            handle.remove()


def _managed(kwargs: Mapping[str, Any]) -> ManagedV4Cache | None:
    # transformers 5.24 renamed the argument.
    cache = kwargs.get("cache", kwargs.get("past_key_values"))
    return cache if isinstance(cache, ManagedV4Cache) else None


def _begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    cache = _managed(kwargs)
    current.set(None)  # whatever a forward that failed has left
    if cache is None:
        return
    ids = kwargs.get("input_ids", args[0] if args else None)
    ids = kwargs.get("inputs_embeds") if ids is None else ids
    assert ids is not None
    cache.state.recover()
    _refuse_padding(kwargs.get("attention_mask"))
    _refuse_positions(kwargs.get("position_ids"), cache.get_seq_length(), ids.shape[1])
    cache.state.begin(ids.shape[0], ids.shape[1])
    if cache.state.decodes and cache.state.form == "triton":
        current.set(cache.state)


_ADVICE = (
    "use a V4StepDriver, which takes each prompt without its padding, or batches of one length"
)


def _refuse_padding(mask: object) -> None:
    """Rows have one length: stock compressors close their groups for all of them at once."""
    if mask is None:
        return
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
        kind = f"shape {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else type(mask)
        raise NotImplementedError(
            f"[ManagedV4Cache] attention_mask must be (requests, tokens) or None, got {kind}: a "
            f"mask that is made already may hide padding; {_ADVICE}"
        )
    padding = (~mask.bool()).sum(1).tolist()
    if any(padding):
        raise NotImplementedError(
            f"[ManagedV4Cache] attention_mask must have no padding, got {padding} tokens of it in "
            f"the rows: compressors of DeepSeek-V4 have one phase for all rows; {_ADVICE}"
        )


def _refuse_positions(positions: object, seen: int, tokens: int) -> None:
    """Positions that skip or repeat are padding by another name."""
    if isinstance(positions, torch.Tensor):
        wanted = torch.arange(seen, seen + tokens, device=positions.device)
        if positions.shape[-1] != tokens or not bool((positions == wanted).all()):
            raise NotImplementedError(
                f"[ManagedV4Cache] position_ids must be {seen} to {seen + tokens - 1} in each row, "
                f"got {positions.tolist()}; {_ADVICE}"
            )


def _end(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
    cache = _managed(kwargs)
    current.set(None)
    if cache is not None:
        cache.state.end()


def _layer(args: tuple[Any, ...]) -> ManagedCSA | None:
    cache = args[_CACHE]
    if not isinstance(cache, ManagedV4Cache) or not cache.state.decodes:
        return None
    layer = cache.layers[args[_LAYER]]
    assert isinstance(layer, ManagedCSA)
    return layer


def _selected(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
    layer = _layer(args)
    if layer is not None:
        layer.selection = output


def _attend(
    module: nn.Module, args: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    layer = _layer(args)
    return None if layer is None else layer.attend(*output)
