"""Prefill in one process, decode in another: the tokens are those of one stock process.

For a tiny GLM-5 and a tiny DeepSeek-V4: a prefill worker runs stock prompts with everything on
its device; a decode worker with its history in host memory asks for them over NIXL (UCX), receives
history by way of staging and everything else in its pools, and decodes several requests at once,
each from the step on in which it arrived. Then one stock process decodes the same, and every token
is compared. Exits 1 if one differs.

Without NIXL both workers share one process and an in-process transport, which is said.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from _models import MODELS
from _prefill import NAME, Inline, Process, make_bounce
from glm5 import console, fault_of
from rich.progress import Progress

from sparse_kvcm.transfer.attempts import ReceiverOptions, ReceiverUse
from sparse_kvcm.transfer.copier import CudaCopier
from sparse_kvcm.transfer.in_process import InProcessTransport, Network
from sparse_kvcm.transfer.nixl import INSTALL, NixlTransport, load
from sparse_kvcm.transfer.receiver import Receiver
from sparse_kvcm.transfer.target import OffloadTarget
from sparse_kvcm.transfer.transport import Route

STAGING_SLOTS = 6
SLICE_PAGES = 2


@dataclass
class Outcome:
    """What a decode worker did.

    Attributes
    ----------
    tokens : dict of int to list of int
        By request.
    batches : list of list of int
        Requests of each step, in their order.
    """

    tokens: dict[int, list[int]] = field(default_factory=dict)
    batches: list[list[int]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


class Decode:
    """A decode worker: receives requests and decodes those that are there."""

    def __init__(self, model: Any, device: str, transport: Any, new_tokens: int) -> None:
        stock = model.build(device)
        longest = max(model.lengths) + new_tokens
        self.manager = model.make_manager(stock, longest, resident=False)
        self.driver = model.make_driver(stock, self.manager)
        self.receiver = Receiver(
            transport,
            OffloadTarget(self.manager, STAGING_SLOTS),
            options=ReceiverOptions(slice_pages=SLICE_PAGES),
            bounce=make_bounce(device),
        )
        self.lengths: Sequence[int] = model.lengths
        self.new_tokens = new_tokens

    def run(self, prefill: Inline | Process, progress: Progress) -> Outcome:
        """Ask for all requests, and decode until each has its tokens or has failed."""
        outcome, first, arrived = Outcome(), dict[int, int](), set[int]()
        received = progress.add_task("received", total=len(self.lengths))
        decoded = progress.add_task("decoded", total=len(self.lengths) * self.new_tokens)
        self.receiver.add_peer(prefill.card)
        prefill.meet(self.receiver.card())
        for index, length in enumerate(self.lengths):
            self.receiver.request(NAME, str(index), index, length, length + self.new_tokens)
        requests: dict[Any, int] = {}
        while len(outcome.tokens) + len(outcome.faults) < len(self.lengths):
            try:
                first.update(prefill.tokens())
            except (EOFError, OSError):
                self.receiver.remove_peer(NAME, "its process has ended")
            for one in self.receiver.poll():
                progress.advance(received)
                if one.reason:
                    outcome.faults.append(f"request {one.request_id}: {one.reason}")
                else:
                    arrived.add(one.key)
            for index in sorted(arrived & first.keys()):
                arrived.discard(index)
                request = self.driver.adopt(index, first[index], self.new_tokens)
                requests[request] = index
                progress.advance(decoded)
            come = len(requests) + len(outcome.tokens) + len(outcome.faults)
            is_first = not outcome.batches and len(requests) < 2 and come < len(self.lengths)
            stepped = {} if is_first else self.driver.step()  # the first step waits for a second
            if stepped:
                outcome.batches.append([requests[one] for one in stepped])
                progress.advance(decoded, len(stepped))
            else:
                time.sleep(0.0002)
            for request in [one for one in requests if len(one.tokens) == self.new_tokens]:
                outcome.tokens[requests.pop(request)] = request.tokens
        if self.receiver.use != ReceiverUse():
            outcome.faults.append(f"not all has come back: {self.receiver.use}")
        return outcome


def make_workers(
    kind: str, model: Any, device: str, new_tokens: int, transport: str
) -> tuple[Decode, Inline | Process]:
    """Both workers."""
    if transport == "nixl":
        prefill = Process(kind, model.lengths, device)
        return Decode(model, device, NixlTransport("decode"), new_tokens), prefill
    network = Network()
    if device != "cpu":
        index = torch.device(device).index or 0
        copier = CudaCopier(index)
        network.copiers = {
            Route("VRAM", "VRAM", index, index): copier,
            Route("VRAM", "DRAM", index, 0): copier,
            Route("DRAM", "VRAM", 0, index): copier,
        }
    inline = Inline(kind, model.lengths, device, InProcessTransport(network, NAME))
    return Decode(model, device, InProcessTransport(network, "decode"), new_tokens), inline


def run(kind: str, device: str, new_tokens: int, transport: str) -> list[str]:
    """One model; what was wrong."""
    model = MODELS[kind]()
    console.print(
        f"{model.title}: prompts of {', '.join(map(str, model.lengths))} tokens, "
        f"{STAGING_SLOTS} slots of staging"
    )
    with Progress(console=console) as progress:
        decode, prefill = make_workers(kind, model, device, new_tokens, transport)
        try:
            outcome = decode.run(prefill, progress)
        finally:
            decode.receiver.close(0)
            prefill.close()
            decode.driver.close()
        task = progress.add_task("stock", total=1)
        wanted = model.stock(device, new_tokens, outcome.batches)
        progress.advance(task)
    joined = max((len(batch) for batch in outcome.batches), default=0)
    moved = ", ".join(
        f"{source} -> {target} {size / 1024:,.0f} KiB"
        for (source, target), size in sorted(decode.receiver.num_bytes.items())
    )
    console.print(f"{moved}; {len(outcome.batches)} steps of up to {joined} requests")
    faults = [f"{model.title}: {fault}" for fault in outcome.faults]
    if joined < 2 and not faults:
        faults.append(f"{model.title}: decode was not concurrent")
    for index, tokens in outcome.tokens.items():
        if tokens != wanted[index]:
            place = next(
                i
                for i, pair in enumerate(zip(tokens, wanted[index], strict=True))
                if pair[0] != pair[1]
            )
            faults.append(f"{model.title}: request {index} differs at token {place}")
    return faults


def choose_transport(wanted: str | None) -> str:
    """NIXL, unless something else is wanted or it is not there."""
    if wanted == "in_process":
        return wanted
    try:
        load()
    except ImportError:
        if wanted == "nixl":
            raise
        console.print(f"NIXL is not installed ({INSTALL}): one process, in-process transport")
        return "in_process"
    return "nixl"


def main(arguments: list[str] | None = None) -> int:
    """Run both models and compare; the exit status."""
    parser = argparse.ArgumentParser(description="Prefill and decode in two processes.")
    parser.add_argument("--new-tokens", type=int, default=60, help="tokens per request")
    parser.add_argument("--device", default="cpu", help="cpu (the default), cuda or cuda:<index>")
    parser.add_argument("--model", choices=list(MODELS), help="one of them (default: all)")
    parser.add_argument("--transport", choices=["nixl", "in_process"], help="(default: NIXL)")
    options = parser.parse_args(arguments)
    if options.new_tokens < 2:
        parser.error(f"--new-tokens must be >= 2, got {options.new_tokens}")
    if fault := fault_of(options.device):
        parser.error(fault)
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    if options.device == "cpu":
        os.environ.setdefault("UCX_NET_DEVICES", "lo")  # both workers are on this machine
    torch.set_num_threads(1)  # more threads only wait for each other at this size
    transport = choose_transport(options.transport)
    begin = time.perf_counter()
    console.print(
        f"transformers {transformers.__version__}, {transport} transport, "
        f"{'two processes' if transport == 'nixl' else 'one process'}, on {options.device}"
    )
    kinds = [options.model] if options.model else list(MODELS)
    faults = []
    for kind in kinds:
        faults += run(kind, options.device, options.new_tokens, transport)
    console.print(f"{time.perf_counter() - begin:.1f} s")
    for fault in faults:
        console.print(fault)
    if faults:
        return 1
    requests = sum(len(MODELS[kind].lengths) for kind in kinds)
    console.print(f"tokens identical: {requests} requests x {options.new_tokens} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
