"""The calls of a model's manager that are about requests and steps, not about what layers hold."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

from sparse_kvcm._core import InvalidArgument, InvalidState
from sparse_kvcm.adapter.store import Store, check_int
from sparse_kvcm.step import PreparedStep, StepRequest, prepare


class OpenStep(Protocol):
    """A step with the tensors of a model."""

    @property
    def prepared(self) -> PreparedStep:
        """Who takes part."""


StepT = TypeVar("StepT", bound=OpenStep)


class RequestManager(ABC, Generic[StepT]):
    """Requests on a `Store`, and one step at a time.

    A step is `prepare_step`, the model's own calls, then `end_step`. A forward that fails needs no
    call: the next `prepare_step`, or `abort_step`, drops all that it began. One thread at a time.

    Attributes
    ----------
    store : Store
    """

    store: Store
    _step: StepT | None = None

    # --- requests ---

    def add_request(self, request_id: int, max_tokens: int) -> None:
        """Make a request that will have at most so many tokens.

        Raises
        ------
        InvalidArgument
            For an id in use, or more tokens than max_seq_len.
        OutOfPages
            If there is no room for it; it is unknown then.
        """
        self.store.add(request_id, max_tokens)

    def free_request(self, request_id: int) -> None:
        """End a request. What it had is reused once an open step no longer reads it.

        Raises
        ------
        InvalidState
            If it is on its way in from a peer (`transfer.receiver.Receiver.cancel` ends that).
        """
        self._check_known("free_request", request_id)
        self.store.free(request_id)

    def suspend_request(self, request_id: int) -> None:
        """Give a request's row back, and all that its store keeps for requests with a row.

        With pages in a `KvCacheManager` those are its lease and its GPU pages.

        Raises
        ------
        InvalidState
            In an open step.
        OutOfPages
            If there is no room for what it leaves; it stays as it was.
        """
        self._check_known("suspend_request", request_id)
        self._check_closed("suspend_request")
        self.store.suspend(request_id)

    def resume_request(self, request_id: int) -> None:
        """Make a suspended request ready for `prepare_step`.

        Raises
        ------
        OutOfPages
            If there is no room; it stays suspended.
        """
        self._check_known("resume_request", request_id)
        self.store.resume(request_id)

    def frontier(self, request_id: int) -> int | None:
        """Tokens that the manager has of a request; None for one that it does not know."""
        return self.store.frontier(request_id)

    # --- one step ---

    def prepare_step(
        self, requests: Iterable[StepRequest], *, padded_size: int | None = None
    ) -> StepT:
        """Open a step and return its index tensors, in the order in which the forward runs it.

        Parameters
        ----------
        requests : iterable of StepRequest
            In any order; see `sparse_kvcm.step.prepare`, which also lists what is raised.
        padded_size : int, optional
            Rows of the graph that runs it.
        """
        self.abort_step()  # also if there are late errors
        self.store.check_late_errors()
        prepared = prepare(
            self.store, requests, padded_size=padded_size, decode_only=self.store.decodes_only
        )
        try:
            self._step = self._make_step(prepared)
        except BaseException:
            self.abort_step()
            raise
        return self._step

    def end_step(self) -> None:
        """Make the step's tokens real. Who still reads is waited for before memory is reused."""
        prepared = self.require_step("end_step").prepared
        self.store.commit(prepared.rows[: len(prepared.requests)])
        self._forget()

    def abort_step(self) -> None:
        """Drop the step: every request is as it was before. No-op without one."""
        self._forget()
        self.store.abort_open_step()

    @property
    def step(self) -> StepT | None:
        """The step that is open."""
        return self._step

    def require_step(self, function: str) -> StepT:
        """The step that is open, for a call of this name.

        Raises
        ------
        InvalidState
            If none is.
        """
        if self._step is None:
            raise InvalidState(f"[{function}] no step is open; call prepare_step first")
        return self._step

    # --- for adapters ---

    @abstractmethod
    def _make_step(self, prepared: PreparedStep) -> StepT:
        """Write the tensors of a step."""

    @abstractmethod
    def _forget_selections(self) -> None:
        """The step is over; what it selected is no longer there."""

    def _forget(self) -> None:
        self._step = None
        self._forget_selections()

    def _check_closed(self, function: str) -> None:
        if self._step is not None:
            raise InvalidState(f"[{function}] a step is open; end or abort it first")

    def _check_known(self, function: str, request_id: int) -> int:
        """Tokens of a request, which must be known."""
        check_int(function, "request_id", request_id)
        frontier = self.store.frontier(request_id)
        if frontier is None:
            raise InvalidArgument(
                f"[{function}] request_id must be one of the manager's, got {request_id}"
            )
        return frontier
