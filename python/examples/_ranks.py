"""Several decode workers of `disaggregated`, each a rank with requests of its own (attention DP).

They agree on their sizes over torch.distributed: NCCL where each has a GPU, else gloo. One prefill
process sends to all of them. This process passes cards and first tokens on, and waits.
"""

from __future__ import annotations

import datetime
import multiprocessing
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from _decode import Decode, Outcome, Progress
from _models import MODELS
from _prefill import Process, make_nixl

from sparse_kvcm.sizing import TorchRanks
from sparse_kvcm.transfer.ranks import RankInfo

PATIENCE = datetime.timedelta(seconds=120)


def place(device: str, num_ranks: int) -> tuple[list[str], str]:
    """The device of each rank, from the second GPU on, and who carries their sizes."""
    if device == "cpu":
        return ["cpu"] * num_ranks, "gloo"
    gpus = torch.cuda.device_count()
    devices = [f"cuda:{(rank + 1) % gpus}" for rank in range(num_ranks)]
    return devices, "nccl" if gpus >= num_ranks else "gloo"


class Telling:
    """Tells another process how far it is."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def add_task(self, description: str, *, total: int) -> str:
        """What will be counted."""
        del total
        return description

    def advance(self, task: str, advance: float = 1) -> None:
        """Count."""
        self._pipe.send(("advance", task, advance))


class Passed:
    """The prefill worker, by way of the process that started this one."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.card: bytes = pipe.recv()

    def meet(self, card: bytes) -> None:
        """Learn of the decode worker."""
        self._pipe.send(("card", card))

    def tokens(self) -> list[tuple[int, int]]:
        """Index and first token of requests that have been computed. EOFError: it has died."""
        found = []
        while self._pipe.poll():
            one = self._pipe.recv()
            if one is None:
                raise EOFError
            found.append(one)
        return found


def serve(
    kind: str,
    lengths: Sequence[int],
    device: str,
    rank: RankInfo,
    backend: str,
    store: str,
    new_tokens: int,
    pipe: Connection,
) -> None:
    """Be a decode rank."""
    distributed = torch.distributed
    torch.set_num_threads(1)
    if device != "cpu":
        torch.cuda.set_device(device)
    distributed.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank.rank,
        world_size=rank.num_ranks,
        timeout=PATIENCE,
    )
    model = MODELS[kind]()
    model.lengths = tuple(lengths)
    transport = make_nixl(f"decode{rank.rank}", device)
    decode = Decode(model, device, transport, new_tokens, rank, TorchRanks())
    try:
        config = decode.manager.config
        pipe.send(("sizes", config.max_batch_size, config.gpu_quota, config.offload.host_pages))
        pipe.send(("outcome", decode.run(Passed(pipe), Telling(pipe))))
    finally:
        decode.close()
    distributed.barrier()  # whoever left first would break the connections of the others
    distributed.destroy_process_group()


class DecodeRanks:
    """The ranks, on devices as of `place`, as their parent sees them; the prefill is on `first`.

    Attributes
    ----------
    sizes : dict of int to tuple of int
        Batch, bytes of pools and host pages of each rank.
    """

    def __init__(
        self,
        kind: str,
        lengths: Sequence[int],
        first: str,
        devices: Sequence[str],
        backend: str,
        new_tokens: int,
    ) -> None:
        self.sizes: dict[int, tuple[int, ...]] = {}
        self._lengths, self._new_tokens = lengths, new_tokens
        self._folder = tempfile.TemporaryDirectory()
        self._prefill = Process(kind, lengths, first, num_peers=len(devices))
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        store = str(Path(self._folder.name) / "store")
        for rank, device in enumerate(devices):
            ours, theirs = context.Pipe()
            info = RankInfo(rank, len(devices), "attention_dp")
            what = (kind, tuple(lengths), device, info, backend, store, new_tokens, theirs)
            process = context.Process(target=serve, args=what, daemon=True)
            process.start()
            theirs.close()
            ours.send(self._prefill.card)
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, progress: Progress) -> Outcome:
        """Until each rank has an outcome; all of them in one."""
        total = len(self._lengths)
        tasks = {
            "received": progress.add_task("received", total=total),
            "decoded": progress.add_task("decoded", total=total * self._new_tokens),
        }
        outcome, left = Outcome(), set(range(len(self._pipes)))
        while left:
            self._pass_tokens()
            for rank in sorted(left):
                try:
                    if self._pipes[rank].poll(0.001):
                        self._take(rank, self._pipes[rank].recv(), outcome, left, progress, tasks)
                except (EOFError, OSError):
                    outcome.faults.append(f"decode rank {rank} has ended; it said why above")
                    left.discard(rank)
        if not outcome.faults and len(set(self.sizes.values())) != 1:
            outcome.faults.append(f"ranks have different sizes: {self.sizes}")
        return outcome

    def close(self) -> None:
        """End all of them."""
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        self._prefill.close()
        self._folder.cleanup()

    def _pass_tokens(self) -> None:
        try:
            for index, token in self._prefill.tokens():
                self._pipes[index % len(self._pipes)].send((index, token))
        except (EOFError, OSError):
            for pipe in self._pipes:
                pipe.send(None)

    def _take(
        self,
        rank: int,
        message: tuple[Any, ...],
        outcome: Outcome,
        left: set[int],
        progress: Progress,
        tasks: dict[str, Any],
    ) -> None:
        what, *values = message
        if what == "card":
            self._prefill.meet(values[0])
        elif what == "sizes":
            self.sizes[rank] = tuple(values)
        elif what == "advance":
            progress.advance(tasks[values[0]], values[1])
        else:
            left.discard(rank)
            outcome.tokens |= values[0].tokens
            outcome.batches += values[0].batches
            outcome.faults += values[0].faults
            for route, size in values[0].moved.items():
                outcome.moved[route] = outcome.moved.get(route, 0) + size
