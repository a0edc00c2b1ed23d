"""Prefill in one process, decode in another: the tokens are those of one stock process.

For a tiny GLM-5 and a tiny DeepSeek-V4: a prefill worker runs stock prompts with everything on
its device; a decode worker with its history in host memory asks for them over NIXL (UCX), receives
history by way of staging and everything else in its pools, and decodes several requests at once,
each from the step on in which it arrived. Then one stock process decodes the same, and every token
is compared. Exits 1 if one differs.

Without NIXL both workers share one process and an in-process transport, which is said. With
`--decode-ranks` several decode workers share the requests of one prefill.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from _decode import STAGING_SLOTS, Decode, Outcome
from _models import MODELS
from _prefill import NAME, Inline, Process, make_nixl
from _ranks import DecodeRanks, place
from glm5 import console, fault_of
from rich.progress import Progress

from sparse_kvcm.transfer.copier import CudaCopier
from sparse_kvcm.transfer.in_process import InProcessTransport, Network
from sparse_kvcm.transfer.nixl import INSTALL, load
from sparse_kvcm.transfer.transport import Route

MAX_RANKS = 16


@dataclass(frozen=True)
class Setting:
    """How workers are put together.

    Attributes
    ----------
    device, prefill_device : str
        Of the decode and of the prefill workers.
    transport : str
    new_tokens : int
        Of each request.
    num_ranks : int
        Decode workers.
    """

    device: str
    prefill_device: str
    transport: str
    new_tokens: int
    num_ranks: int = 1

    @property
    def routes(self) -> set[tuple[str, str]]:
        """Memory types that bytes go between: of index keys and windows, and of history."""
        here, there = (
            "DRAM" if device == "cpu" else "VRAM" for device in (self.prefill_device, self.device)
        )
        return {(here, there), (here, "DRAM")}


def make_workers(kind: str, model: Any, setting: Setting) -> tuple[Decode, Inline | Process]:
    """Both workers."""
    device, first = setting.device, setting.prefill_device
    if setting.transport == "nixl":
        prefill = Process(kind, model.lengths, first)
        return Decode(model, device, make_nixl("decode", device), setting.new_tokens), prefill
    network = Network()
    here, there = (torch.device(one).index or 0 for one in (first, device))
    if (first, device) != ("cpu", "cpu"):
        network.copiers = {
            Route("VRAM", "VRAM", here, there): CudaCopier(here),
            Route("VRAM", "DRAM", here, 0): CudaCopier(here),
            Route("DRAM", "VRAM", 0, there): CudaCopier(there),
        }
    inline = Inline(kind, model.lengths, first, InProcessTransport(network, NAME))
    transport = InProcessTransport(network, "decode")
    return Decode(model, device, transport, setting.new_tokens), inline


def run_one(kind: str, model: Any, setting: Setting, progress: Progress) -> Outcome:
    """One decode worker, in this process."""
    decode, prefill = make_workers(kind, model, setting)
    try:
        return decode.run(prefill, progress)
    finally:
        decode.receiver.close(0)
        prefill.close()
        decode.driver.close()


def run_ranks(kind: str, model: Any, setting: Setting, progress: Progress) -> Outcome:
    """Several decode workers, each in a process of its own."""
    devices, backend = place(setting.device, setting.num_ranks)
    first = setting.prefill_device
    workers = DecodeRanks(kind, model.lengths, first, devices, backend, setting.new_tokens)
    try:
        outcome = workers.run(progress)
    finally:
        workers.close()
    if workers.sizes:
        batch, quota, pages = workers.sizes[min(workers.sizes)]
        console.print(
            f"{len(devices)} ranks on {', '.join(devices)} agreed over {backend}: "
            f"{batch} requests, pools of {quota:,} bytes, {pages:,} host pages each"
        )
    return outcome


def run(kind: str, setting: Setting) -> list[str]:
    """One model; what was wrong."""
    model = MODELS[kind]()
    console.print(
        f"{model.title}: prompts of {', '.join(map(str, model.lengths))} tokens, "
        f"{STAGING_SLOTS} slots of staging"
    )
    with Progress(console=console) as progress:
        run_workers = run_ranks if setting.num_ranks > 1 else run_one
        outcome = run_workers(kind, model, setting, progress)
        task = progress.add_task("stock", total=1)
        wanted = model.stock(setting.device, setting.new_tokens, outcome.batches)
        progress.advance(task)
    joined = max((len(batch) for batch in outcome.batches), default=0)
    moved = ", ".join(
        f"{source} -> {target} {size / 1024:,.0f} KiB"
        for (source, target), size in sorted(outcome.moved.items())
    )
    console.print(f"{moved}; {len(outcome.batches)} steps of up to {joined} requests")
    faults = [f"{model.title}: {fault}" for fault in outcome.faults]
    if not faults and set(outcome.moved) != setting.routes:
        faults.append(f"{model.title}: routes must be {setting.routes}, got {set(outcome.moved)}")
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
    parser.add_argument("--decode-ranks", type=int, default=1, help="with attention DP; takes NIXL")
    parser.add_argument("--prefill-device", help="of the prefill worker (default: as --device)")
    options = parser.parse_args(arguments)
    first = options.prefill_device or options.device
    if options.new_tokens < 2:
        parser.error(f"--new-tokens must be >= 2, got {options.new_tokens}")
    if not 1 <= options.decode_ranks <= MAX_RANKS:
        parser.error(f"--decode-ranks must be in [1, {MAX_RANKS}], got {options.decode_ranks}")
    if fault := fault_of(options.device) or fault_of(first):
        parser.error(fault)
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    os.environ.setdefault("UCX_NET_DEVICES", "lo")  # all workers are on this machine
    torch.set_num_threads(1)  # more threads only wait for each other at this size
    transport = choose_transport(options.transport)
    ranks = options.decode_ranks
    if ranks > 1 and transport != "nixl":
        console.print("skipped: decode ranks are processes, which meet over NIXL alone")
        return 0
    begin = time.perf_counter()
    console.print(
        f"transformers {transformers.__version__}, {transport} transport, "
        f"{1 + ranks if transport == 'nixl' else 'one'} process{'es' * (transport == 'nixl')}, "
        f"prefill on {first}, decode on {options.device}"
    )
    kinds = [options.model] if options.model else list(MODELS)
    faults = []
    for kind in kinds:
        faults += run(kind, Setting(options.device, first, transport, options.new_tokens, ranks))
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
