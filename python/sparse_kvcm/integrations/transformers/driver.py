"""A step driver: requests join, leave, suspend and resume between decode steps of one model.

`generate` fixes its batch; this does not. Each step is one call of the model's `forward` for the
active requests in the order of their rows, padded on the left to the longest. Between changes of
that set the padded indexer keys are kept as they are; a change takes the requests out of the cache
and puts those that stay back in, with new padding.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

import sparse_kvcm as kvcm
from sparse_kvcm.dsa import DsaManager
from sparse_kvcm.integrations.transformers._arguments import (
    cache_argument,
    check_int,
    check_model,
    prompt_tokens,
    token_list,
)
from sparse_kvcm.integrations.transformers._closing import Closing
from sparse_kvcm.integrations.transformers.attention import IMPLEMENTATION
from sparse_kvcm.integrations.transformers.cache import OffloadedCache
from sparse_kvcm.integrations.transformers.dsa_steps import DsaSteps, steps_for
from sparse_kvcm.integrations.transformers.geometry import DsaGeometry, manager_for
from sparse_kvcm.integrations.transformers.state import CacheState, Form, Parked
from sparse_kvcm.integrations.transformers.statistics import GroupStatistics

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class RequestState(enum.Enum):
    """Where a request stands."""

    ACTIVE = "active"
    SUSPENDED = "suspended"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """One request of a :class:`StepDriver`.

    Attributes
    ----------
    prompt_length : int
        Tokens of its prompt.
    max_new_tokens : int
        After so many tokens it is finished.
    tokens : list of int
        What has been decoded.
    state : RequestState
        A finished request holds nothing any more.
    """

    prompt_length: int
    max_new_tokens: int
    tokens: list[int] = field(default_factory=list)
    state: RequestState = RequestState.ACTIVE
    _parked: Parked | None = field(default=None, repr=False)

    @property
    def cache(self) -> Any:
        """Its history in the manager; closed once it is finished."""
        if self._parked is None:
            raise kvcm.InvalidState("[Request.cache] the request has no history yet")
        return self._parked.cache


Sample = Callable[[torch.Tensor, Sequence[Request]], torch.Tensor]


def greedy(logits: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
    """Take the likeliest token of each row of ``logits``, ``[b, vocabulary]``."""
    return logits.argmax(-1)


class StepDriver(Closing):
    """Decodes requests that come and go, with their latents in host memory.

    Parameters
    ----------
    model : PreTrainedModel
        A GLM-5 or DeepSeek-V3.2 model that uses the attention implementation ``"sparse_kvcm"``.
    max_rows : int
        Most requests that are active at a time.
    max_length : int
        Most tokens of one request, output included.
    max_requests : int, optional
        Requests that the host can hold, suspended ones included. Default ``max_rows``.
        Only without ``manager``.
    cached_slots : int, optional
        N; see :func:`manager_config`. Only without ``manager``.
    tokens_per_block : int, optional
        Tokens of one page. Default 64. Only without ``manager``.
    manager : KvCacheManager or DsaManager, optional
        Made for the model. A DSA manager of either version holds index keys too. Default: a
        KvCacheManager for this driver alone.
    form : {"scatter", "compact", "triton"}
        As in :class:`OffloadedCache`.
    sample : callable
        ``(logits [b, vocabulary], requests) -> int64 [b]``, tokens of the model's vocabulary.
        Default: the likeliest.
    eos_token_id : int, optional
        A request that decodes it is finished.

    Notes
    -----
    A call that raises leaves every request as it was before; `step` can be called again.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_rows: int,
        max_length: int,
        max_requests: int | None = None,
        cached_slots: int | None = None,
        tokens_per_block: int | None = None,
        manager: kvcm.KvCacheManager | DsaManager | None = None,
        form: Form = "scatter",
        sample: Sample = greedy,
        eos_token_id: int | None = None,
    ) -> None:
        check_model("StepDriver", model)
        geometry = DsaGeometry.from_config(model.config, model.dtype)
        _check_implementation(model)
        manager = manager_for(
            "StepDriver",
            model,
            manager,
            max_rows=max_rows,
            max_length=max_length,
            max_requests=max_requests,
            cached_slots=cached_slots,
            tokens_per_block=tokens_per_block,
        )
        self._model = model
        self._form = form
        self._sample = sample
        self._eos_token_id = eos_token_id
        self._cache_argument = cache_argument(model)
        self._steps = steps_for(manager, geometry, max_rows=max_rows, max_length=max_length)
        self._state = self._make_state(max_length)
        self._requests: list[Request] = []  # active and suspended
        self._seated: list[Request] = []  # in the cache now, in its order

    @property
    def manager(self) -> Any:
        """The manager that holds the histories."""
        return self._steps.manager

    @property
    def requests(self) -> tuple[Request, ...]:
        """Active and suspended requests, in the order in which they came."""
        return tuple(self._requests)

    # --- requests come and go ---

    def add(self, prompt_ids: Sequence[int] | torch.Tensor, max_new_tokens: int) -> Request:
        """Run a prompt and seat its request. Its first token is decoded on the way.

        Parameters
        ----------
        prompt_ids : sequence of int, or torch.Tensor
            Token ids, at least one.
        max_new_tokens : int
            At least 1. With the prompt it must stay within ``max_length`` + 1: the last token
            never enters the history.

        Raises
        ------
        ValueError
            For an empty or too long prompt, or one with ids outside the model's vocabulary.
        InvalidState
            If no row is free.
        OutOfPages
            If the arena or host history is full.
        """
        ids = prompt_tokens(
            "StepDriver.add", prompt_ids, self._model.config.vocab_size, self._steps.device
        )
        check_int("StepDriver.add", "max_new_tokens", max_new_tokens)
        need = ids.numel() + max_new_tokens - 1
        if need > self._steps.max_length:
            raise ValueError(
                "[StepDriver.add] prompt and output must take at most max_length = "
                f"{self._steps.max_length} units, got {need}"
            )
        request = Request(ids.numel(), max_new_tokens)
        state = self._make_state(need)
        tokens = self._forward(state, ids, [request])
        (request._parked,) = state.take()
        self._requests.append(request)
        self._note(request, tokens[0])
        return request

    def adopt(self, request_id: int, first_token: int, max_new_tokens: int) -> Request:
        """Decode a request that the manager has already, such as a received one, and seat it.

        Its prompt ran elsewhere, which gave `first_token`. Only with a DSA manager. Raises as
        `add`, and InvalidArgument for an id that the manager has no tokens of.
        """
        check_int("StepDriver.adopt", "max_new_tokens", max_new_tokens)
        if not isinstance(self._steps, DsaSteps):
            raise ValueError("[StepDriver.adopt] manager must be a DsaManager, which has ids")
        history = self._steps.adopt(request_id, max_new_tokens)
        request = Request(history.committed_length, max_new_tokens)
        request._parked = Parked(history, {})
        self._requests.append(request)
        self._note(request, first_token)
        return request

    def suspend(self, request: Request) -> None:
        """Give an active request's lease and row back; its history stays on the host.

        Raises
        ------
        OutOfPages
            If host history cannot take the units of its window; it stays active then.
        InvalidState
            If it is finished.
        """
        self._check_own(request, "suspend")
        self._park()
        request.cache.suspend(self._steps.stream)
        request.state = RequestState.SUSPENDED

    def resume(self, request: Request) -> None:
        """Give a suspended request a new lease and a row.

        Raises
        ------
        OutOfPages
            If the arena has no room; it stays suspended then.
        InvalidState
            If no row is free, or it is finished.
        """
        self._check_own(request, "resume")
        if request.cache.row is None:  # whoever suspended it: its cache can be suspended too
            self._steps.activate(request.cache)
        request.state = RequestState.ACTIVE

    def remove(self, request: Request) -> None:
        """End a request before its time. No-op if it is finished."""
        if request.state is RequestState.FINISHED:
            return
        self._check_own(request, "remove")
        self._park()
        self._finish(request)

    def close(self) -> None:
        """End all requests and free the rows. No other call may follow."""
        for request in self.requests:
            self.remove(request)
        self._steps.close()

    # --- steps ---

    def step(self) -> dict[Request, int]:
        """Decode one token for each active request.

        Returns
        -------
        dict of Request to int
            Empty without active requests. Requests that got their last token are finished.
        """
        active = [one for one in self._requests if one.state is RequestState.ACTIVE]
        if not active:
            return {}
        active.sort(key=lambda one: one.cache.row or 0)
        if active != self._seated:
            self._park()
            self._state.put([one._parked for one in active if one._parked is not None])
            self._seated = active
        last = torch.tensor([[one.tokens[-1]] for one in active], device=self._steps.device)
        tokens = self._forward(self._state, last, active)
        result = dict(zip(active, tokens, strict=True))
        for request, token in result.items():
            self._note(request, token)
        return result

    def statistics(self) -> list[GroupStatistics]:
        """Counts and memory of each selection group."""
        return self._steps.statistics(request.cache for request in self._requests)

    # --- parts ---

    def _make_state(self, max_length: int) -> CacheState:
        return CacheState(
            self._steps,
            self._model.config,
            max_length=max_length,
            form=self._form,
            commit_after_attention=False,
        )

    def _forward(
        self, state: CacheState, ids: torch.Tensor, requests: Sequence[Request]
    ) -> list[int]:
        """Run one forward and sample; either all of it counts or nothing."""
        mask = state.attention_mask(*ids.shape)
        cache = OffloadedCache._from_state(state, self._model)
        try:
            with torch.no_grad():
                output = self._model(
                    input_ids=ids,
                    attention_mask=mask,
                    position_ids=(mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :],
                    use_cache=True,
                    logits_to_keep=1,
                    **{self._cache_argument: cache},
                )
                sampled = torch.as_tensor(self._sample(output.logits[:, -1], requests))
            if tuple(sampled.shape) != (len(requests),):
                raise ValueError(
                    f"[StepDriver] sample must give tokens of shape ({len(requests)},), got "
                    f"{tuple(sampled.shape)}"
                )
            # Before the commit: a bad token would fail every later step of its batch.
            tokens = token_list(
                "StepDriver", "tokens of sample", sampled, self._model.config.vocab_size
            )
            state.commit()
        except BaseException:
            state.recover()
            raise
        return tokens

    def _note(self, request: Request, token: int) -> None:
        request.tokens.append(token)
        if len(request.tokens) == request.max_new_tokens or token == self._eos_token_id:
            self._park()
            self._finish(request)

    def _finish(self, request: Request) -> None:
        request.cache.close()
        if request._parked is not None:
            request._parked.indexer_keys.clear()
        request.state = RequestState.FINISHED
        self._requests.remove(request)

    def _park(self) -> None:
        """Take every request out of the cache, so that the next step forms a new one."""
        for request, parked in zip(self._seated, self._state.take(), strict=True):
            request._parked = parked
        self._seated = []

    def _check_own(self, request: Request, function: str) -> None:
        if request not in self._requests:
            raise kvcm.InvalidState(
                f"[StepDriver.{function}] the request must be one of this driver's, not finished; "
                f"it is {request.state.value}"
            )


def _check_implementation(model: PreTrainedModel) -> None:
    chosen = model.config._attn_implementation
    if chosen != IMPLEMENTATION:
        raise ValueError(
            f'[StepDriver] the model\'s attention implementation must be "{IMPLEMENTATION}", got '
            f'"{chosen}". Call model.set_attn_implementation("{IMPLEMENTATION}")'
        )
