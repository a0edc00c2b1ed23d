"""Transfers between memory of a GPU and of the host, over the in-process transport."""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import replace

import msgspec
import numpy as np
import pytest

import sparse_kvcm as kvcm
from sparse_kvcm.transfer import nixl
from sparse_kvcm.transfer.copier import CudaCopier, HostCopier
from sparse_kvcm.transfer.page_table import PoolGroup
from sparse_kvcm.transfer.transport import Region, Route, TransferState
from transfer_cases import Side, check_landed
from transfer_nixl_process import hold_on_gpu, make_on_gpu, wait
from transfer_world import KINDS, World

TYPES = ("VRAM", "DRAM")


class DeviceSide(Side):
    """A side whose pools of VRAM are on the GPU; those of NumPy are what is written and read."""

    def __post_init__(self) -> None:
        super().__post_init__()
        import torch

        self.torch = torch
        self.on_gpu = {
            index: torch.from_numpy(self.pools[index]).to("cuda:0")
            for index, kind in enumerate(self.kinds)
            if kind.memory == "VRAM"
        }
        groups = list(self.table.pool_groups)
        for index, tensor in self.on_gpu.items():
            pool = msgspec.structs.replace(groups[index].pools[0], base_address=tensor.data_ptr())
            groups[index] = PoolGroup((pool,))
        self.table = msgspec.structs.replace(self.table, pool_groups=tuple(groups))
        torch.cuda.synchronize()

    def write(self, name: str, lists, tokens: int) -> None:
        super().write(name, lists, tokens)
        for index, tensor in self.on_gpu.items():
            tensor.copy_(self.torch.from_numpy(self.pools[index]))
        self.torch.cuda.synchronize()

    def download(self) -> None:
        for index, tensor in self.on_gpu.items():
            self.pools[index][:] = tensor.cpu().numpy()


def gpu_bytes(size: int) -> tuple[object, int]:
    import torch

    tensor = torch.zeros(max(size, 1), dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    return tensor, tensor.data_ptr()


@pytest.fixture
def copier() -> CudaCopier:
    torch = pytest.importorskip("torch")
    if kvcm.cuda_is_available() and torch.cuda.is_available():
        torch.cuda.init()
        return CudaCopier(0)
    if os.environ.get("SPARSE_KVCM_REQUIRE_CUDA"):
        pytest.fail("SPARSE_KVCM_REQUIRE_CUDA is set and there is no GPU")
    pytest.skip("no GPU")


def make_world(copier: CudaCopier, here: str, there: str, bounce_bytes: int = 0) -> World:
    routes = [Route(a, b) for a in TYPES for b in TYPES]
    return World(
        kinds=[replace(KINDS[0], memory=here), *KINDS[1:]],
        landing=[replace(KINDS[0], memory=there), *KINDS[1:]],
        copier=copier,
        copiers={route: copier for route in routes if "VRAM" in (route.source, route.target)},
        make_side=DeviceSide,
        make_bytes=gpu_bytes,
        bounce_bytes=bounce_bytes,
    )


@pytest.mark.parametrize("bounce_bytes", [0, 1 << 16])
@pytest.mark.parametrize("there", TYPES)
@pytest.mark.parametrize("here", TYPES)
def test_a_request_lands_on_gpu_and_host(
    copier: CudaCopier, here: str, there: str, bounce_bytes: int
) -> None:
    world = make_world(copier, here, there, bounce_bytes)
    receiver = world.receiver()
    world.offer("a", 37)
    receiver.ask("a", 37, bounce=receiver.grant if bounce_bytes else None)
    for _ in range(100_000):
        world.step()
        if world.outcomes:
            break
    (result,) = receiver.poll()
    assert result.status == "done"
    bases = {one.bounce_dst_base for one in result.transfer_groups if one.source == one.target}
    assert (receiver.grant.address in bases) == (bounce_bytes > 0)
    receiver.side.download()
    check_landed("a", world.source, receiver.side, receiver.side.pages(37), 37)
    world.assert_nothing_is_held()


@pytest.mark.parametrize("there", TYPES)
@pytest.mark.parametrize("here", TYPES)
def test_nixl_moves_ranges_of_gpu_and_host_into_another_process(
    copier: CudaCopier, here: str, there: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    try:
        nixl.load()
    except ImportError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    size = 1 << 20
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=hold_on_gpu, args=(theirs, size), daemon=True)
    process.start()
    wait(lambda: pipe.poll(0.01))
    metadata, addresses = pipe.recv()
    transport = make_on_gpu("sender")
    source = torch.arange(size, device="cuda:0").to(torch.uint8) | 1
    source = source if here == "VRAM" else source.cpu().pin_memory()
    torch.cuda.synchronize()
    registration = transport.register([Region(source.data_ptr(), size, here)])
    transport.add_peer(metadata)
    begins = np.array([0, 8192, 65536], np.uint64)
    sizes = np.array([132, 4096, size - 65536], np.uint64)
    base = np.uint64(source.data_ptr()), np.uint64(addresses[there])
    ranges = np.stack((base[0] + begins, base[1] + begins, sizes), axis=1)
    handle = transport.prepare("held", Route(here, there), ranges)
    transport.start(handle)
    wait(lambda: transport.poll(handle) is not TransferState.PENDING)
    assert transport.poll(handle) is TransferState.DONE
    pipe.send("show")
    wait(lambda: pipe.poll(0.01))
    landed = pipe.recv()
    expected = np.zeros(size, np.uint8)
    for begin, count in zip(begins.tolist(), sizes.tolist(), strict=True):
        expected[begin : begin + count] = source.cpu().numpy()[begin : begin + count]
    assert (landed[there] == expected).all()
    assert not landed["DRAM" if there == "VRAM" else "VRAM"].any()
    transport.release(handle)
    transport.deregister(registration)
    pipe.send("end")
    process.join(30)


def test_copies_between_pinned_memory_and_a_gpu_run_behind_the_caller(copier: CudaCopier) -> None:
    import torch

    source = torch.arange(1 << 20, dtype=torch.int32).pin_memory()
    there = torch.zeros(1 << 20, dtype=torch.int32, device="cuda:0")
    back = torch.zeros(1 << 20, dtype=torch.int32).pin_memory()
    torch.cuda.synchronize()
    for here, to in ((source, there), (there, back)):
        copy = copier.start(np.array([[here.data_ptr(), to.data_ptr(), 4 << 20]], np.uint64))
        while not copy.query():
            pass
        assert copy.query()
    assert torch.equal(source, back)


def test_a_gpu_that_is_not_there_is_refused(copier: CudaCopier) -> None:
    with pytest.raises(kvcm.NotAvailable, match="no GPU 99"):
        CudaCopier(99)


def test_the_host_copier_is_done_at_once() -> None:
    source, target = np.arange(9, dtype=np.uint8), np.zeros(9, np.uint8)
    ranges = np.array([[source.ctypes.data, target.ctypes.data + 1, 8]], np.uint64)
    assert HostCopier().start(ranges).query()
    assert target.tolist() == [0, *range(8)]
