"""A receiver in a process of its own, over NIXL: see test_transfer_nixl.py."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection

import numpy as np

from sparse_kvcm.transfer.nixl import NixlTransport
from sparse_kvcm.transfer.ranks import RankInfo
from sparse_kvcm.transfer.transport import Region
from sparse_kvcm.transfer.wire import (
    RequestData,
    decode_card,
    decode_message,
    encode_message,
    make_card,
)
from transfer_cases import ALL_KINDS, Side, check_landed

KINDS = tuple(replace(kind, memory="DRAM") for kind in ALL_KINDS)
PAGES = 8  # of a request, on the source
GIVE_UP = 60.0  # seconds, in which a test that hangs ends


def wait(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + GIVE_UP
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("nothing has come")


def source_side() -> Side:
    return Side(KINDS, 8, num_slots=64, value=0x11)


def slots_of(index: int) -> range:
    return range(PAGES * index, PAGES * (index + 1))


def receive(pipe: Connection, name: str, requests: dict[str, tuple[int, int]]) -> None:
    """Ask for requests, by name their index and tokens; say "landed" when all lie where they must.

    Told "die", it asks and ends without a word.
    """
    transport = NixlTransport(name)
    side = Side(KINDS, 16, num_slots=64)
    transport.register(side.table.regions())
    pipe.send(make_card(name, transport.kind, RankInfo(), transport.metadata(), side.table))
    sender = transport.add_peer(decode_card(pipe.recv()).metadata)
    for request, (index, tokens) in requests.items():
        pages = tuple(side.pages(tokens, slots_of(index)))
        data = RequestData(request, 1, 0, 1, 0, tokens, tokens, pages)
        transport.send(sender, encode_message(data))
    pipe.send("asked")
    if pipe.recv() == "die":
        return
    results = []

    def all_there() -> bool:
        results.extend(decode_message(data) for _, data in transport.receive())
        return len(results) == len(requests)

    wait(all_there)
    assert {one.status for one in results} == {"done"}, results
    source = source_side()
    for request, (index, tokens) in requests.items():
        alone = Side(KINDS, 16, num_slots=64)
        pages = side.pages(tokens, slots_of(index))
        for mine, theirs, lists in zip(alone.pools, side.pools, pages, strict=True):
            mine[lists.slots] = theirs[lists.slots]
        check_landed(request, source, alone, pages, tokens)
    pipe.send("landed")


def hold(pipe: Connection, size: int) -> None:
    """Register memory, and wait to be killed."""
    transport = NixlTransport("held")
    memory = np.zeros(size, np.uint8)
    transport.register([Region(memory.ctypes.data, size, "DRAM")])
    pipe.send((transport.metadata(), memory.ctypes.data))
    pipe.recv()


def make_on_gpu(name: str) -> NixlTransport:
    """A NIXL agent of a process that has a CUDA context."""
    import torch

    torch.cuda.set_device(0)
    torch.zeros(1, device="cuda:0")
    return NixlTransport(name)


def hold_on_gpu(pipe: Connection, size: int) -> None:
    """Register memory of GPU and host; say what has come when asked."""
    import torch

    transport = make_on_gpu("held")
    vram = torch.zeros(size, dtype=torch.uint8, device="cuda:0")
    dram = torch.zeros(size, dtype=torch.uint8).pin_memory()
    torch.cuda.synchronize()
    transport.register(
        [Region(vram.data_ptr(), size, "VRAM"), Region(dram.data_ptr(), size, "DRAM")]
    )
    pipe.send((transport.metadata(), {"VRAM": vram.data_ptr(), "DRAM": dram.data_ptr()}))
    pipe.recv()
    pipe.send({"VRAM": vram.cpu().numpy(), "DRAM": dram.numpy()})
    pipe.recv()
