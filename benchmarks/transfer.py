#!/usr/bin/env python3
"""What a transfer takes against one range of as many bytes, between two processes over NIXL.

    python benchmarks/transfer.py [--tokens 32768] [--pages 64 64] [--staging] [--scattered]
                                  [--json FILE]

A slice of GLM-5.2: 8 layers of 576 B of latents and 2 of 132 B of index keys per token, from pools
like a resident manager's into pools like staging's, host memory on both sides; with --staging its
pages have the tokens of the source's, whatever those of the index keys. Timed is all of it:
the request's way there, projection, submission, bytes, the result's way back. The limit is one
range of the same bytes in the same run. As many ranges, but of one size and without us, say what
the engine asks for descriptors.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from sparse_kvcm import UnitLayout
from sparse_kvcm.transfer.nixl import NixlTransport
from sparse_kvcm.transfer.page_table import (
    BufferEntry,
    LayerGroup,
    PageFormat,
    PageTable,
    Pool,
    PoolGroup,
    PoolView,
)
from sparse_kvcm.transfer.ranks import RankInfo
from sparse_kvcm.transfer.sender import Sender
from sparse_kvcm.transfer.transport import Region, Route, TransferState
from sparse_kvcm.transfer.wire import (
    PageList,
    RequestData,
    decode_card,
    decode_message,
    encode_message,
    make_card,
)

BUFFERS = (("KEY", UnitLayout([576]), range(8)), ("INDEX_KEY", UnitLayout([128, 4]), (0, 4)))
REPEATS = 7


class Side:
    """Pools of both kinds for one request, and its pages."""

    def __init__(self, tokens: int, tokens_per_block: int, order: str, staging: int = 0) -> None:
        self.memory, self.pages, groups, pool_groups, formats = [], [], [], [], []
        for index, (role, layout, layers) in enumerate(BUFFERS):
            page = staging if staging and role == "KEY" else tokens_per_block
            num_pages = -(-tokens // page)
            form = PageFormat.of(layout, page)
            slot_bytes = len(layers) * form.page_bytes
            memory = np.full(num_pages * slot_bytes, index + 1, np.uint8)
            entries = tuple(
                BufferEntry((layer,), role, place * form.page_bytes, index)
                for place, layer in enumerate(layers)
            )
            self.memory.append(memory)
            formats.append(form)
            groups.append(LayerGroup(index, None, (PoolView(0, "replicated", entries),), page))
            pool_groups.append(
                PoolGroup((Pool(memory.ctypes.data, slot_bytes, num_pages, "DRAM"),))
            )
            slots = np.arange(num_pages)
            if order == "scattered":
                slots = np.random.default_rng(os.getpid()).permutation(slots)
            self.pages.append(PageList.of(index, 0, slots))
        self.table = PageTable(tokens_per_block, tuple(groups), tuple(pool_groups), tuple(formats))


def receive(pipe: Connection, tokens: int, tokens_per_block: int, order: str, staging: int) -> None:
    """Ask for the request again and again; time each."""
    side = Side(tokens, tokens_per_block, order, staging)
    transport = NixlTransport("receiver")
    transport.register(side.table.regions())
    whole = np.zeros(sum(memory.nbytes for memory in side.memory), np.uint8)
    transport.register([Region(whole.ctypes.data, whole.nbytes, "DRAM")])
    card = make_card("receiver", "nixl", RankInfo(), transport.metadata(), side.table)
    pipe.send((card, whole.ctypes.data, whole.nbytes))
    sender = transport.add_peer(decode_card(pipe.recv()).metadata)
    times = []
    for repeat in range(REPEATS):
        begin = time.perf_counter()
        pages = tuple(side.pages)
        data = RequestData(f"r{repeat}", 1, 0, 1, 0, tokens, tokens, pages)
        transport.send(sender, encode_message(data))
        while not (found := transport.receive()):
            time.sleep(0.0002)  # as an engine would between its steps
        times.append(time.perf_counter() - begin)
        result = decode_message(found[0][1])
        assert result.status == "done", result
    pipe.send((times, sum(one.num_ranges for one in result.transfer_groups)))
    pipe.recv()


def measure(transport: NixlTransport, source: np.ndarray, target: int, count: int) -> float:
    """Least seconds of all bytes in so many ranges."""
    bounds = np.linspace(0, source.nbytes, count + 1).astype(np.int64)
    columns = (source.ctypes.data + bounds[:-1], target + bounds[:-1], np.diff(bounds))
    ranges = np.stack(columns, axis=1).astype(np.uint64)
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        handle = transport.prepare("receiver", Route("DRAM", "DRAM"), ranges)
        transport.start(handle)
        while transport.poll(handle) is TransferState.PENDING:
            pass
        times.append(time.perf_counter() - begin)
        transport.release(handle)
    return min(times)


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--pages", type=int, nargs=2, default=(64, 64), metavar=("HERE", "THERE"))
    parser.add_argument("--staging", action="store_true")
    parser.add_argument("--scattered", action="store_const", const="scattered", default="in a row")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    here, there = options.pages
    child = (theirs, options.tokens, there, options.scattered, here * options.staging)
    process = context.Process(target=receive, args=child, daemon=True)
    process.start()
    side = Side(options.tokens, here, options.scattered)
    transport = NixlTransport("sender")
    sender = Sender(transport, side.table)
    card, target, size = pipe.recv()
    whole = np.ones(size, np.uint8)
    registration = transport.register([Region(whole.ctypes.data, size, "DRAM")])
    sender.add_peer(card)
    limit = measure(transport, whole, target, 1)
    for repeat in range(REPEATS):
        sender.offer(f"r{repeat}", options.tokens, side.pages)
    pipe.send(sender.card())
    while not pipe.poll():
        sender.progress()
    times, num_ranges = pipe.recv()
    engine = measure(transport, whole, target, num_ranges)
    pipe.send("end")
    process.join()
    transport.deregister(registration)
    record = {
        "bench": "transfer",
        "case": f"{options.tokens} tokens, pages {here} to {there}, {options.scattered}"
        + ", staging as the source" * options.staging,
        "value": size / min(times) / 1e9,
        "unit": "GB/s",
        "limit": size / limit / 1e9,
        "share": limit / min(times),
        "share_of_as_many": engine / min(times),
        "ranges": num_ranges,
    }
    print(
        f"{record['case']}: {size / 1e6:.0f} MB in {num_ranges} ranges, "
        f"{record['value']:.2f} GB/s; one range {record['limit']:.2f} GB/s: {record['share']:.0%}, "
        f"as many of one size: {record['share_of_as_many']:.0%}"
    )
    if options.json:
        options.json.write_text(json.dumps([record]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
