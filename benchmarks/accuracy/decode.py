"""Batches of requests through a worker, and what makes a run worthless.

A batch stays whole until each of its requests has ended its answer, or has all its tokens, as in
`generate`: so every step has all of them, in both runs that are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.accuracy.workers import Worker

LEAST_REQUESTS = 2


class WorthlessRunError(RuntimeError):
    """The run went well, and would say nothing about offload in use."""


@dataclass
class Run:
    """What a run decoded, and how.

    Attributes
    ----------
    tokens : list of tuple of int
        Of each request, in the order of the prompts, up to its end.
    steps, rows : int
        Decode steps, and requests in them, summed over the steps.
    fewest_rows : int
        Requests of the smallest step.
    shortest_history : int
        Least units that a request had when its first step began.
    lease : int or None
        Units of a lease; None if everything was resident.
    hits, misses : int
        Selected units that were in a lease already, and those that were fetched.
    """

    lease: int | None
    tokens: list[tuple[int, ...]] = field(default_factory=list)
    steps: int = 0
    rows: int = 0
    fewest_rows: int = 0
    shortest_history: int = 0
    hits: int = 0
    misses: int = 0


def decode(
    worker: Worker,
    prompts: Sequence[Sequence[int]],
    *,
    rows: int,
    new_tokens: int,
    ends: frozenset[int],
    advance: Callable[[int], None] = lambda tokens: None,
) -> Run:
    """Decode every prompt, in batches of at most `rows`, smallest batch first.

    Parameters
    ----------
    worker : Worker
        Fresh.
    prompts : sequence of sequence of int
    rows : int
    new_tokens : int
        Most tokens of an answer, at least 2: the first one is the prompt's.
    ends : frozenset of int
        Tokens that end an answer.
    advance : callable
        Is told of tokens that are decoded.

    Raises
    ------
    WorthlessRunError
        As soon as a step has fewer than 2 requests, or a history fits its lease; at the end if
        an offloaded run has fetched nothing.
    """
    run = Run(worker.lease)
    begin = 0
    for size in batch_sizes(len(prompts), rows):
        requests = []
        for index in range(begin, begin + size):
            requests.append(worker.add(prompts[index], new_tokens))
            _note_history(run, index, worker.history(requests[-1]))
            advance(1)
        _finish(worker, run, requests, ends, advance)
        run.tokens += [cut(request.tokens, ends) for request in requests]
        begin += size
    run.hits, run.misses = worker.counts()
    if run.lease is not None and run.misses == 0:
        raise WorthlessRunError("the offloaded run fetched nothing: selections stayed in leases")
    return run


def batch_sizes(count: int, rows: int) -> list[int]:
    """Cut requests into batches of nearly equal size, ascending."""
    batches = -(-count // rows)
    return sorted(count // batches + (i < count % batches) for i in range(batches))


def cut(tokens: Sequence[int], ends: frozenset[int]) -> tuple[int, ...]:
    """An answer up to its end."""
    for place, token in enumerate(tokens):
        if token in ends:
            return tuple(tokens[: place + 1])
    return tuple(tokens)


def _finish(
    worker: Worker,
    run: Run,
    requests: Sequence[Any],
    ends: frozenset[int],
    advance: Callable[[int], None],
) -> None:
    """Step until every request is finished, or all have ended."""
    while worker.driver.requests:
        _note_step(run, len(worker.driver.step()))
        advance(len(requests))
        if all(ends.intersection(request.tokens) for request in requests):
            for request in requests:
                worker.driver.remove(request)


def _note_step(run: Run, rows: int) -> None:
    run.steps += 1
    run.rows += rows
    run.fewest_rows = min(run.fewest_rows or rows, rows)
    if rows < LEAST_REQUESTS:
        raise WorthlessRunError(
            f"decode was not batched: step {run.steps} had {rows} of at least {LEAST_REQUESTS} "
            "requests. Choose --requests and --batch-size so that no batch has one request alone"
        )


def _note_history(run: Run, index: int, units: int) -> None:
    run.shortest_history = min(run.shortest_history or units, units)
    if run.lease is not None and units <= run.lease:
        raise WorthlessRunError(
            f"offload was not in use: the history of request {index} has {units} units and fits "
            f"its lease of {run.lease}. Take longer documents, or lower --gpu-cache-factor"
        )
