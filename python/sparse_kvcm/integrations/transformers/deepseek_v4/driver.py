"""A step driver: requests of any lengths join, leave, suspend and resume between steps.

One step of the manager serves all active requests. Each runs in a forward of its own, since a
DeepSeek-V4's compressors close their groups for all rows of a batch at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from sparse_kvcm._core import InvalidState
from sparse_kvcm.deepseek_v4 import DeepseekV4CacheManager
from sparse_kvcm.integrations.transformers._arguments import (
    cache_argument,
    check_int,
    check_model,
    prompt_tokens,
    token_list,
)
from sparse_kvcm.integrations.transformers._closing import Closing
from sparse_kvcm.integrations.transformers.deepseek_v4.cache import ManagedV4Cache, check_form
from sparse_kvcm.integrations.transformers.deepseek_v4.hooks import attach
from sparse_kvcm.integrations.transformers.deepseek_v4.state import Form
from sparse_kvcm.integrations.transformers.driver import RequestState

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(eq=False)
class V4Request:
    """One request of a :class:`V4StepDriver`.

    Attributes
    ----------
    prompt_length, max_new_tokens : int
        After so many new tokens it is finished.
    tokens : list of int
        What has been decoded.
    state : RequestState
    """

    prompt_length: int
    max_new_tokens: int
    _cache: ManagedV4Cache = field(repr=False)
    tokens: list[int] = field(default_factory=list)
    state: RequestState = RequestState.ACTIVE

    @property
    def request_id(self) -> int:
        """In the manager."""
        return self._cache.state.requests[0]

    @property
    def length(self) -> int:
        """Tokens in the manager."""
        return self._cache.state.length

    @property
    def hits(self) -> int:
        """Selected entries of offloaded layers that were in its lease."""
        return self._cache.state.hits

    @property
    def misses(self) -> int:
        """Those that were fetched."""
        return self._cache.state.misses


Sample = Callable[[torch.Tensor, V4Request], int]


def greedy(logits: torch.Tensor, request: V4Request) -> int:
    """Take the likeliest token of ``logits``, ``[vocabulary]``."""
    return int(logits.argmax())


class V4StepDriver(Closing):
    """Decodes requests that come and go on one manager. A context: it attaches its hooks.

    Parameters
    ----------
    model : PreTrainedModel
        A DeepSeek-V4.
    manager : DeepseekV4CacheManager
        Made for the model.
    form : {"scatter", "compact", "triton"}
        As in :class:`ManagedV4Cache`.
    sample : callable
        ``(logits [vocabulary], request) -> token``. Default: the likeliest.

    Notes
    -----
    A call that raises leaves every request as it was before; `step` can be called again.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        manager: DeepseekV4CacheManager,
        *,
        form: Form = "scatter",
        sample: Sample = greedy,
    ) -> None:
        check_model("V4StepDriver", model)
        check_form("V4StepDriver", model, form)
        self.manager = manager
        self._model = model
        self._form = form
        self._sample = sample
        self._requests: list[V4Request] = []
        self._hooks = attach(model)
        self._cache_argument = cache_argument(model)
        self._hooks.__enter__()

    @property
    def requests(self) -> tuple[V4Request, ...]:
        """Active and suspended requests, in the order in which they came."""
        return tuple(self._requests)

    def add(self, prompt_ids: Sequence[int] | torch.Tensor, max_new_tokens: int) -> V4Request:
        """Run a prompt. Its first token is decoded on the way.

        Raises
        ------
        ValueError
            For an empty or too long prompt, or one with ids outside the model's vocabulary.
        OutOfPages
            If there is no room.
        """
        ids = prompt_tokens(
            "V4StepDriver.add", prompt_ids, self._model.config.vocab_size, self._model.device
        )
        check_int("V4StepDriver.add", "max_new_tokens", max_new_tokens)
        cache = self._make_cache(ids.numel() + max_new_tokens - 1)
        request = V4Request(ids.numel(), max_new_tokens, cache)
        try:
            token = self._forward(request, ids)
        except BaseException:
            cache.reset()
            raise
        self._requests.append(request)
        self._note(request, token)
        return request

    def adopt(self, request_id: int, first_token: int, max_new_tokens: int) -> V4Request:
        """Decode a request that the manager has already, such as a received one.

        Its prompt ran elsewhere, which gave `first_token`.

        Raises
        ------
        InvalidArgument
            If the manager has no tokens of it.
        """
        check_int("V4StepDriver.adopt", "max_new_tokens", max_new_tokens)
        length = self.manager.frontier(request_id) or 0
        cache = self._make_cache(length + max_new_tokens - 1)
        cache.state.adopt(request_id)
        request = V4Request(length, max_new_tokens, cache)
        self._requests.append(request)
        self._note(request, first_token)
        return request

    def step(self) -> dict[V4Request, int]:
        """Decode one token for each active request; those that got their last one are finished."""
        active = [one for one in self._requests if one.state is RequestState.ACTIVE]
        if not active:
            return {}
        self.manager.prepare_step(
            [one._cache.state.step_requests(place)[0] for place, one in enumerate(active)]
        )
        tokens = {}
        try:
            for place, one in enumerate(active):
                one._cache.state.at = slice(place, place + 1)
                last = torch.tensor([one.tokens[-1:]], device=self._model.device)
                tokens[one] = self._forward(one, last)
            self.manager.end_step()
        except BaseException:
            self.manager.abort_step()
            for one in active:
                one._cache.state.recover()
            raise
        for one, token in tokens.items():
            one._cache.state.committed()
            self._note(one, token)
        return tokens

    def suspend(self, request: V4Request) -> None:
        """Give a request's row back, and all that the manager keeps for requests with a row."""
        self._check(request, RequestState.ACTIVE, "suspend")
        self.manager.suspend_request(request.request_id)
        request.state = RequestState.SUSPENDED

    def resume(self, request: V4Request) -> None:
        """Let a suspended request take part again. OutOfPages if there is no room."""
        self._check(request, RequestState.SUSPENDED, "resume")
        self.manager.resume_request(request.request_id)
        request.state = RequestState.ACTIVE

    def remove(self, request: V4Request) -> None:
        """End a request before its time. No-op if it is finished."""
        if request in self._requests:
            request._cache.reset()
            request.state = RequestState.FINISHED
            self._requests.remove(request)

    def close(self) -> None:
        """End all requests and take the hooks off."""
        for request in self.requests:
            self.remove(request)
        self._hooks.__exit__(None, None, None)

    # --- parts ---

    def _make_cache(self, max_length: int) -> ManagedV4Cache:
        return ManagedV4Cache(
            self._model, self.manager, max_length=max_length, form=self._form, owns_steps=False
        )

    def _forward(self, request: V4Request, ids: torch.Tensor) -> int:
        with torch.no_grad():
            output = self._model(
                input_ids=ids,
                use_cache=True,
                logits_to_keep=1,
                **{self._cache_argument: request._cache},
            )
        token = torch.tensor([self._sample(output.logits[0, -1], request)])
        vocabulary = self._model.config.vocab_size
        return token_list("V4StepDriver", "tokens of sample", token, vocabulary)[0]

    def _note(self, request: V4Request, token: int) -> None:
        request.tokens.append(token)
        if len(request.tokens) == request.max_new_tokens:
            self.remove(request)

    def _check(self, request: V4Request, state: RequestState, function: str) -> None:
        if request not in self._requests or request.state is not state:
            raise InvalidState(
                f"[V4StepDriver.{function}] the request must be one of this driver's and "
                f"{state.value}, it is {request.state.value}"
            )
