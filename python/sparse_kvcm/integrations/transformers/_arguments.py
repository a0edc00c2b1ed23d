"""Checks of what a user passes; messages name the function, the argument, the limit, the value."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Sequence
from typing import Any

import torch


def check_int(function: str, name: str, value: Any, minimum: int = 1) -> None:
    """Check an int that must be at least ``minimum``.

    Raises
    ------
    ValueError
        For a bool or another type too.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise ValueError(f"[{function}] {name} must be an int, got {type(value).__name__} {value}")
    if number < minimum:
        raise ValueError(f"[{function}] {name} must be >= {minimum}, got {number}")


def check_model(function: str, model: Any) -> None:
    """Check that something is a model of transformers, wrapped or not.

    Raises
    ------
    ValueError
        If it has no configuration or no dtype.
    """
    if not hasattr(model, "config") or not hasattr(model, "dtype"):
        raise ValueError(
            f"[{function}] model must be a transformers model, got {type(model).__name__} {model}"
        )


def token_list(function: str, name: str, tokens: torch.Tensor, vocab_size: int) -> list[int]:
    """Turn token ids, ``[n]``, into ints.

    Raises
    ------
    ValueError
        If they are no integers, or one is not in ``[0, vocab_size)``.
    """
    dtype = tokens.dtype
    if dtype.is_floating_point or dtype.is_complex or dtype is torch.bool:
        raise ValueError(f"[{function}] {name} must be of an integer dtype, got {dtype}")
    ids: list[int] = tokens.tolist()
    for index, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"[{function}] {name} must be in [0, {vocab_size}), the model's vocabulary, got "
                f"{token} at index {index}"
            )
    return ids


def prompt_tokens(
    function: str, prompt_ids: Sequence[int] | torch.Tensor, vocab_size: int, device: torch.device
) -> torch.Tensor:
    """A prompt as int64 ``[1, n]`` on a device.

    Raises
    ------
    ValueError
        If it is not one row of at least one token, or as `token_list`.
    """
    ids = torch.as_tensor(prompt_ids, device=device)
    if ids.ndim != 1 or len(ids) < 1:
        raise ValueError(
            f"[{function}] prompt_ids must be one row of at least 1 token, got shape "
            f"{tuple(ids.shape)}"
        )
    token_list(function, "prompt_ids", ids, vocab_size)
    return ids[None].long()


def cache_argument(model: Any) -> str:
    """The name of the argument by which a model takes its cache; transformers 5.24 changed it."""
    parameters = inspect.signature(model.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"
