"""One decision on all ranks.

Every collective is entered by every rank: work that may fail runs before one, inside
`on_every_rank`, which carries the failure through the collective instead of around it. So a rank
that fails makes all fail, and none waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class OtherRankError(RuntimeError):
    """Another rank could not do its part; its own error says why."""


class Ranks(Protocol):
    """Ranks that decide together."""

    def minimum(self, values: Sequence[int]) -> list[int]:
        """The least of all ranks, value by value."""

    def gather(self, message: str) -> list[str]:
        """The messages of all ranks, by rank."""


class SingleRank:
    """A rank that is alone: it agrees with itself."""

    def minimum(self, values: Sequence[int]) -> list[int]:
        """Return what was given."""
        return list(values)

    def gather(self, message: str) -> list[str]:
        """Return what was given."""
        return [message]


class TorchRanks:
    """The ranks of a ``torch.distributed`` process group, gloo or NCCL.

    Parameters
    ----------
    group : ProcessGroup, optional
        The default group without it. Its timeout bounds the wait for a rank that has died.
    """

    def __init__(self, group: Any = None) -> None:
        import torch
        import torch.distributed

        self._torch = torch
        self._group = group
        backend = torch.distributed.get_backend(group)
        self._device = "cuda" if backend == "nccl" else "cpu"

    def minimum(self, values: Sequence[int]) -> list[int]:
        """All-reduce MIN in 64 bits."""
        distributed = self._torch.distributed
        tensor = self._torch.tensor(list(values), dtype=self._torch.int64, device=self._device)
        distributed.all_reduce(tensor, op=distributed.ReduceOp.MIN, group=self._group)
        return [int(value) for value in tensor.tolist()]

    def gather(self, message: str) -> list[str]:
        """All-gather."""
        distributed = self._torch.distributed
        messages: list[Any] = [None] * distributed.get_world_size(self._group)
        distributed.all_gather_object(messages, message, group=self._group)
        return [str(message) for message in messages]


def on_every_rank(ranks: Ranks, work: Callable[[], T]) -> T:
    """Do `work`, and raise on every rank if it failed on one.

    Collective. A rank whose own work failed raises its own exception; the others drop their result
    and raise `OtherRankError` with the first failure's rank and words.
    """
    result: T
    error: Exception | None = None
    try:
        result = work()
    except Exception as failure:  # carried through the collective
        error = failure
    failures = ranks.gather("" if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for rank, message in enumerate(failures):
        if message:
            del result  # the exception keeps this frame, and with it what was allocated
            raise OtherRankError(f"[on_every_rank] rank {rank} failed: {message}")
    return result
