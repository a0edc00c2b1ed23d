"""What the layers of one managed cache share: its requests, and where its forward stands.

    IDLE -> PROMPT -> IDLE    layers work as stock ones; then each request's part is imported
    IDLE -> STEP -> IDLE      one token per request, in a step of the manager

A forward that fails leaves its phase behind; the next one finds it and undoes it.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch.utils.dlpack import from_dlpack

from sparse_kvcm._core import InvalidArgument, InvalidState
from sparse_kvcm.deepseek_v4 import DeepseekV4CacheManager, DeepseekV4History
from sparse_kvcm.deepseek_v4.history import Key
from sparse_kvcm.deepseek_v4.step import At
from sparse_kvcm.integrations.transformers.steps import DecodeError
from sparse_kvcm.step import StepRequest

if TYPE_CHECKING:
    from sparse_kvcm.integrations.transformers.deepseek_v4.layers import _Managed

Form = Literal["scatter", "compact", "triton"]
_ids = itertools.count()


class Phase(enum.Enum):
    """What a cache is in the middle of."""

    IDLE = enum.auto()
    PROMPT = enum.auto()
    STEP = enum.auto()


class V4State:
    """State of a cache.

    Parameters
    ----------
    manager : DeepseekV4CacheManager
        May serve several caches, one forward at a time.
    layers : sequence
        Of the cache.
    biases : dict
        Position bias of each compressor, by layer and name.
    max_length : int
        Most tokens of each request.
    form : {"scatter", "compact", "triton"}
        How selected entries are attended to.
    owns_steps : bool
        Whether each forward is a step of the manager, or somebody else opens and ends steps.
    """

    def __init__(
        self,
        manager: DeepseekV4CacheManager,
        layers: Sequence[_Managed],
        biases: dict[tuple[int, str], torch.Tensor],
        *,
        max_length: int,
        form: Form,
        owns_steps: bool,
    ) -> None:
        self.manager = manager
        self.biases = biases
        self.form = form
        self.at: At = slice(None)
        self.length = 0
        self.requests: list[int] = []
        self.slots: dict[int, torch.Tensor] = {}  # of selections, by layer, until they are read
        self.misses = 0
        self.hits = 0
        self._layers = layers
        self._max_length = max_length
        self._owns_steps = owns_steps
        self._phase = Phase.IDLE
        self._checks: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        for index, layer in enumerate(layers):
            layer.bind(self, index)

    @property
    def tokens_seen(self) -> int:
        """Tokens of each request before the forward at hand."""
        return 0 if self._phase is Phase.PROMPT else self.length

    @property
    def decodes(self) -> bool:
        """Whether the forward at hand is a decode step."""
        return self._phase is Phase.STEP

    def adopt(self, request: int) -> None:
        """Go on with a request that the manager has already."""
        length = self.manager.frontier(request)
        if not length:
            raise InvalidArgument(
                f"[ManagedV4Cache] request must be one with tokens in the manager, got {request}"
            )
        self.requests, self.length = [request], length
        self._set_lengths()

    def begin(self, batch: int, tokens: int) -> None:
        """A forward of so many tokens for each of so many requests begins."""
        self.recover()
        if not self.requests:
            self._begin_prompt(batch, tokens)
            return
        if batch != len(self.requests) or tokens != 1:
            raise NotImplementedError(
                f"[ManagedV4Cache] a filled cache takes one token of each of its "
                f"{len(self.requests)} requests, got {batch} x {tokens}; prompts come whole"
            )
        if self._owns_steps:
            self.manager.prepare_step(self.step_requests())
        elif self.manager.step is None:
            raise InvalidState("[ManagedV4Cache] no step is open; use the driver's step")
        self._phase = Phase.STEP

    def end(self) -> None:
        """All layers have run."""
        if self._phase is Phase.PROMPT:
            self._import()
        elif self._phase is Phase.STEP:
            self.check()
            if self._owns_steps:
                self.manager.end_step()
                self.committed()

    def committed(self) -> None:
        """The step's token is real."""
        self._phase = Phase.IDLE
        self.length += 1
        self._set_lengths()

    def recover(self) -> None:
        """Undo the forward that is under way, if any."""
        phase, self._phase = self._phase, Phase.IDLE
        self._checks.clear()
        self.slots.clear()
        if phase is Phase.PROMPT:
            self.clear()
        elif phase is Phase.STEP and self._owns_steps:
            self.manager.abort_step()

    def clear(self) -> None:
        """End every request."""
        for request in self.requests:
            if self.manager.frontier(request) is not None:
                self.manager.free_request(request)
        self.requests = []
        self.length = 0
        self._drop_tensors()

    def step_requests(self, first: int = 0) -> list[StepRequest]:
        """What a step that decodes all of them is told, from a place on."""
        return [
            StepRequest(request, self.length, batch_index=first + i)
            for i, request in enumerate(self.requests)
        ]

    def select(self, layer: int, selection: torch.Tensor) -> torch.Tensor:
        """Rows of a layer's selected entries, ``[b, k]``."""
        slots = self.manager.select(layer, selection.contiguous(), self.at)
        if self.manager.config.offload is not None:
            out = self.manager.resolved(layer)
            counts = (out.errors, out.hit_counts, out.miss_counts)
            errors, hits, misses = (from_dlpack(one).long() for one in counts)
            self._checks.append((errors.clone(), hits.clone(), misses.clone()))
        return slots

    def check(self) -> None:
        """Refuse to go on if the device reported a fault, and count what it did.

        Raises
        ------
        DecodeError
            The step has not ended then.
        """
        if self._checks:
            # One wait per forward, for a promise: no token comes out of a step that went wrong.
            errors, hits, misses = (torch.stack(one) for one in zip(*self._checks, strict=True))
            self._checks.clear()
            if errors.any():
                raise DecodeError(f"[ManagedV4Cache] the device reported: {errors.tolist()}")
            self.hits += int(hits.sum())
            self.misses += int(misses.sum())

    # --- parts ---

    def _begin_prompt(self, batch: int, tokens: int) -> None:
        if tokens > self._max_length:
            raise ValueError(
                f"[ManagedV4Cache] the prompt must have at most max_length = {self._max_length} "
                f"tokens, got {tokens}"
            )
        self._phase = Phase.PROMPT
        for _ in range(batch):
            request = next(_ids)
            self.manager.add_request(request, self._max_length)
            self.requests.append(request)
        self.length = tokens

    def _import(self) -> None:
        for row, request in enumerate(self.requests):
            items: dict[Key, torch.Tensor] = {}
            for layer in self._layers:
                items |= layer.history(row)
            self.manager.import_history(request, DeepseekV4History(self.length, items))
        self._phase = Phase.IDLE
        self._drop_tensors()

    def _drop_tensors(self) -> None:
        for layer in self._layers:
            layer.forget()
        self._set_lengths()

    def _set_lengths(self) -> None:
        for layer in self._layers:
            layer.cumulative_length = self.length
