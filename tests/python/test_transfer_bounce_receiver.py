"""A receiver's bounce region: what it grants, what it believes, and when its room comes back.

Memory of the managers is of the host, and plays VRAM: the network's tables say so.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("msgspec")

import msgspec

from receiver_cases import BOUNCE_BYTES, DsaModel, Pair, V4Model, make_bounce
from sparse_kvcm.transfer.attempts import ReceiverOptions, ReceiverUse
from sparse_kvcm.transfer.copier import Copier, Copy, HostCopier
from sparse_kvcm.transfer.transport import Ranges
from sparse_kvcm.transfer.wire import (
    RequestData,
    SliceResult,
    TransferGroup,
    decode_message,
    encode_message,
)

MODELS = {"dsa": DsaModel(), "v4": V4Model()}
PROMPT = {"dsa": 61, "v4": 401}


@pytest.fixture(params=MODELS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class SlowCopier(Copier):
    """Copies when it is told to, or fails."""

    def __init__(self) -> None:
        self.passed = False
        self.start_error: Exception | None = None
        self.error: Exception | None = None
        self.waiting: list[Ranges] = []

    def start(self, ranges: Ranges) -> Copy:
        if self.start_error is not None:
            raise self.start_error
        self.waiting.append(ranges)
        return self

    def query(self) -> bool:
        if self.error is not None:
            raise self.error
        while self.passed and self.waiting:
            HostCopier().start(self.waiting.pop())
        return self.passed


class Wire:
    """What an end sends, and what becomes of it."""

    def __init__(self, pair: Pair, name: str) -> None:
        self.sent: list[Any] = []
        self.change: Any = lambda message: message
        end = pair.network.ends[name]
        send = end.send

        def tapped(peer: str, data: bytes) -> None:
            message = self.change(decode_message(data))
            self.sent.append(message)
            send(peer, encode_message(message))

        end.send = tapped  # type: ignore[method-assign]

    def groups(self) -> dict[tuple[str, str], list[TransferGroup]]:
        found: dict[tuple[str, str], list[TransferGroup]] = {}
        for one in self.sent:
            if isinstance(one, SliceResult):
                for group in one.transfer_groups:
                    found.setdefault((group.source, group.target), []).append(group)
        return found


def start(pair: Pair, kind: str, request: int = 1) -> None:
    pair.prefill(request, PROMPT[kind])
    pair.ask(request, PROMPT[kind])


@pytest.mark.parametrize("pages", [(1, 1), (2, 1), (1, 2)], ids=["equal", "larger", "smaller"])
def test_small_pages_between_gpus_bounce_and_lie_where_they_belong(
    kind: str, pages: tuple[int, int]
) -> None:
    model = MODELS[kind]
    bounce = make_bounce()
    sizes = (model.page * pages[0], model.page * pages[1])
    pair = Pair(model, pages=sizes, bounce=bounce, source_memory="VRAM")
    wire = Wire(pair, "prefill0")
    start(pair, kind)
    pair.run_to_the_end()
    assert pair.result(1).reason == ""
    groups = wire.groups()
    assert set(groups) == {("VRAM", "VRAM"), ("VRAM", "DRAM")}
    assert all(one.bounce_dst_base is None for one in groups["VRAM", "DRAM"])
    (bounced,) = groups["VRAM", "VRAM"]
    assert (bounced.num_ranges, bounced.bounce_dst_base) == (1, bounce.region.address)
    pair.check({1: PROMPT[kind]})
    pair.end([1])


def test_from_a_host_nothing_bounces(kind: str) -> None:
    pair = Pair(MODELS[kind], bounce=make_bounce(), source_memory="DRAM")
    asked, wire = Wire(pair, "decode"), Wire(pair, "prefill0")
    start(pair, kind)
    pair.run_to_the_end()
    groups = wire.groups()
    assert set(groups) == {("DRAM", "VRAM"), ("DRAM", "DRAM")}
    assert all(one.bounce_dst_base is None for found in groups.values() for one in found)
    assert all(one.bounce is None for one in asked.sent if isinstance(one, RequestData))
    pair.check({1: PROMPT[kind]})
    pair.end([1])


def test_requests_that_find_no_room_in_the_region_go_directly(kind: str) -> None:
    first = Pair(MODELS[kind], bounce=make_bounce(), source_memory="VRAM")
    asked = Wire(first, "decode")
    start(first, kind)
    first.run_to_the_end()
    (size,) = [one.bounce.size for one in asked.sent if isinstance(one, RequestData) and one.bounce]
    pair = Pair(
        MODELS[kind],
        bounce=make_bounce(num_bytes=size + size // 2),  # of one of them
        source_memory="VRAM",
        staging=16,
        options=ReceiverOptions(slice_pages=2),
    )
    wire = Wire(pair, "prefill0")
    for request in (1, 2):
        start(pair, kind, request)
    pair.run_to_the_end()
    found = [one.bounce_dst_base is not None for one in wire.groups()["VRAM", "VRAM"]]
    assert sorted(found) == [False, True]
    pair.check({1: PROMPT[kind], 2: PROMPT[kind]})
    pair.end([1, 2])


@pytest.mark.parametrize(
    "lie",
    [
        {"bounce_dst_base": 4096},
        {"num_bytes": 1},
        {"num_bytes": 1 << 40},
    ],
    ids=["elsewhere", "less", "more"],
)
def test_a_peer_that_lies_about_the_region_costs_its_own_request(kind: str, lie: dict) -> None:
    copier = SlowCopier()
    copier.start_error = AssertionError("it was believed")
    pair = Pair(MODELS[kind], bounce=make_bounce(copier), source_memory="VRAM")
    wire = Wire(pair, "prefill0")

    def change(message: Any) -> Any:
        if not isinstance(message, SliceResult):
            return message
        groups = tuple(
            msgspec.structs.replace(one, **lie) if one.bounce_dst_base else one
            for one in message.transfer_groups
        )
        return msgspec.structs.replace(message, transfer_groups=groups)

    wire.change = change
    start(pair, kind)
    pair.run_to_the_end()
    assert "bounce_dst_base and num_bytes of a peer must be" in pair.result(1).reason
    pair.end()


def test_a_peer_that_bounces_without_a_grant_costs_its_own_request(kind: str) -> None:
    pair = Pair(MODELS[kind], bounce=make_bounce(num_bytes=64), source_memory="VRAM")
    wire = Wire(pair, "prefill0")
    lie = TransferGroup("VRAM", "VRAM", 1, 64, pair.receiver._arrivals._bounce.region.address)

    def change(message: Any) -> Any:
        if isinstance(message, SliceResult) and message.slice_id == 0:
            return msgspec.structs.replace(message, transfer_groups=(lie,))
        return message

    wire.change = change
    start(pair, kind)
    pair.run_to_the_end()
    assert "without a grant" in pair.result(1).reason
    pair.end()


@pytest.mark.parametrize("when", ["posted", "scattering"])
def test_room_of_a_canceled_request_comes_back_when_nothing_uses_it(kind: str, when: str) -> None:
    copier = SlowCopier()
    bounce = make_bounce(copier)
    pair = Pair(MODELS[kind], bounce=bounce, source_memory="VRAM")
    pair.ask(1, PROMPT[kind])
    pair.run()
    if when == "scattering":
        pair.prefill(1, PROMPT[kind])
        pair.run_until(lambda: pair.receiver.use.scattering == 1)
    assert bounce.bytes_in_use > 0
    pair.receiver.cancel("1", "a whim")
    pair.results += pair.receiver.poll()
    assert pair.result(1).reason == "a whim"
    assert bounce.bytes_in_use > 0
    copier.passed = True
    pair.run_to_the_end()
    assert bounce.bytes_in_use == 0
    pair.end()


@pytest.mark.parametrize("when", ["start_error", "error"])
def test_a_scatter_that_fails_fails_its_request_alone(kind: str, when: str) -> None:
    copier = SlowCopier()
    pair = Pair(MODELS[kind], bounce=make_bounce(copier), source_memory="VRAM")
    setattr(copier, when, RuntimeError("no stream"))
    start(pair, kind)
    pair.run_to_the_end()
    assert pair.result(1).reason == "scattering failed: no stream"
    setattr(copier, when, None)
    copier.passed, copier.waiting = True, []
    start(pair, kind, 2)
    pair.run_to_the_end()
    assert pair.result(2).reason == ""
    pair.check({2: PROMPT[kind]})
    pair.end([2])


def test_a_peer_that_is_gone_leaves_its_room(kind: str) -> None:
    bounce = make_bounce()
    pair = Pair(MODELS[kind], bounce=bounce, source_memory="VRAM")
    pair.ask(1, PROMPT[kind])
    pair.run()
    assert 0 < bounce.bytes_in_use <= BOUNCE_BYTES
    pair.network.kill("prefill0")
    pair.receiver.remove_peer("prefill0")
    pair.results += pair.receiver.poll()
    assert pair.receiver.use == ReceiverUse()
    pair.end()
