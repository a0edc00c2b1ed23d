"""A sender and a receiver of tests in one process, under a network that tests control."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from sparse_kvcm.transfer.bounce import Bounce
from sparse_kvcm.transfer.copier import Copier, HostCopier, scattered
from sparse_kvcm.transfer.in_process import InProcessTransport, Network, Policy, Transfer
from sparse_kvcm.transfer.projection import Projection
from sparse_kvcm.transfer.ranks import RankInfo
from sparse_kvcm.transfer.sender import Outcome, Sender, SenderUse
from sparse_kvcm.transfer.transport import Ranges, Region, Route
from sparse_kvcm.transfer.wire import (
    BounceGrant,
    Cancel,
    PageList,
    RequestData,
    SliceResult,
    decode_message,
    encode_message,
    make_card,
)
from transfer_cases import HISTORY, INDEX, SLIDING, Kind, Side

# History ends on a host; the rest stays on GPUs: two routes in one request.
KINDS = (HISTORY, INDEX, SLIDING)
LANDING = (replace(HISTORY, memory="DRAM"), INDEX, SLIDING)


def held(transfer: Transfer) -> None:
    """A policy: transfers end when they are told to."""
    transfer.polls_left = None


class Clock:
    """Seconds that tests set."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def host_bytes(size: int) -> tuple[object, int]:
    """Memory that plays VRAM: what keeps it, and its address."""
    memory = np.zeros(max(size, 1), np.uint8)
    return memory, memory.ctypes.data


class FakeReceiver:
    """Asks for slices and keeps results; what it does with them is the tests' business."""

    def __init__(
        self,
        network: Network,
        name: str,
        side: Side,
        rank: RankInfo,
        bounce: tuple[object, int],
        bounce_bytes: int,
        projection: Projection,
    ) -> None:
        self.projection = projection
        self.places: dict[tuple[str, int], Ranges] = {}  # of what may be bounced, by slice
        self.copier = network.copiers.get(Route("VRAM", "VRAM"), HostCopier())
        self.side = side
        self.transport = InProcessTransport(network, name)
        self.bounce, self.bounce_address = bounce
        self.bounce_bytes = bounce_bytes
        self.regions = side.table.regions()
        if bounce_bytes:
            self.regions.append(Region(self.bounce_address, bounce_bytes, "VRAM"))
        self.transport.register(self.regions)
        self.rank = rank
        self.results: list[SliceResult] = []

    @property
    def grant(self) -> BounceGrant:
        """Its whole bounce region."""
        return BounceGrant(self.bounce_address, self.bounce_bytes)

    def card(self) -> bytes:
        return make_card(
            self.transport.name,
            self.transport.kind,
            self.rank,
            self.transport.metadata(),
            self.side.table,
        )

    def ask(
        self,
        name: str,
        tokens: int,
        pages: Sequence[PageList] | None = None,
        *,
        span: tuple[int, int] | None = None,
        slices: tuple[int, int] = (0, 1),
        attempt: int = 1,
        bounce: BounceGrant | None = None,
    ) -> None:
        begin, end = span or (0, tokens)
        lists = tuple(self.side.pages(tokens) if pages is None else pages)
        if bounce is not None:
            places = self.projection.places(lists, (begin, end), tokens)
            parts = places.get(Route("VRAM", "VRAM"), [np.zeros((0, 2), np.uint64)])
            self.places[name, slices[0]] = np.concatenate(parts)
        self.tell(RequestData(name, attempt, *slices, begin, end, tokens, lists, bounce))

    def tell(self, message: RequestData | SliceResult | Cancel) -> None:
        self.transport.send("sender", encode_message(message))

    def poll(self) -> list[SliceResult]:
        """New results; bounced bytes go where they belong."""
        new = [decode_message(data) for _, data in self.transport.receive()]
        for one in new:
            for group in one.transfer_groups:
                if group.bounce_dst_base is not None:
                    places = self.places[one.request_id, one.slice_id]
                    assert group.num_bytes == places[:, 1].sum()
                    ranges = scattered(group.bounce_dst_base, places)
                    copy = self.copier.start(ranges)
                    while not copy.query():
                        pass
        self.results += new
        return new


class World:
    """One sender, any number of receivers."""

    def __init__(
        self,
        *,
        policy: Policy = lambda transfer: None,
        kinds: Sequence[Kind] = KINDS,
        landing: Sequence[Kind] = LANDING,
        sizes: tuple[int, int] = (8, 16),
        num_slots: int = 16,
        rank: RankInfo | None = None,
        bounce_bytes: int = 0,
        min_bytes: int = 1,
        copier: Copier | None = None,
        copiers: Mapping[Route, Copier] | None = None,
        make_side: Callable[..., Side] = Side,
        make_bytes: Callable[[int], tuple[object, int]] = host_bytes,
    ) -> None:
        self.clock = Clock()
        self.network = Network(policy, copiers or {})
        self.make_side, self.make_bytes = make_side, make_bytes
        self.landing, self.sizes, self.num_slots = landing, sizes, num_slots
        self.source = make_side(kinds, sizes[0], num_slots, value=0x11)
        bounce = None
        if bounce_bytes:
            self.bounce, address = make_bytes(bounce_bytes)
            region = Region(address, bounce_bytes, "VRAM")
            bounce = Bounce(region, copier or HostCopier(), min_bytes)
        self.bounce_bytes = bounce_bytes
        self.transport = InProcessTransport(self.network, "sender")
        self.sender = Sender(
            self.transport, self.source.table, rank=rank, bounce=bounce, clock=self.clock
        )
        self.outcomes: dict[str, Outcome] = {}
        self.receivers: list[str] = []

    def receiver(self, name: str = "receiver", rank: RankInfo | None = None) -> FakeReceiver:
        """A receiver that both sides have met."""
        side = self.make_side(self.landing, self.sizes[1], self.num_slots)
        bounce = self.make_bytes(self.bounce_bytes)
        projection = Projection(self.source.table, side.table)
        one = FakeReceiver(
            self.network, name, side, rank or RankInfo(), bounce, self.bounce_bytes, projection
        )
        self.sender.add_peer(one.card())
        one.transport.add_peer(self.transport.metadata())
        self.receivers.append(name)
        return one

    def offer(self, name: str, tokens: int, slots: Sequence[int] | None = None, **how) -> None:
        """Compute a request, and offer it."""
        pages = self.source.pages(tokens, slots)
        self.source.write(name, pages, tokens)
        self.sender.offer(name, tokens, pages, **how)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            for one in self.sender.progress():
                assert one.request_id not in self.outcomes
                self.outcomes[one.request_id] = one

    @property
    def starts(self) -> list[int]:
        """Transfers in the order of their starts."""
        return [index for event, index in self.network.log if event == "start"]

    def assert_nothing_is_held(self) -> None:
        """All that was taken has come back, when the peers are gone too."""
        for name in self.receivers:
            self.sender.remove_peer(name)
        self.step()
        use = replace(self.sender.use(), num_dropped=0)
        assert use == SenderUse(0, 0, 0, 0, 0, 0)
        assert self.network.transfers == {}
        self.sender.close()
        assert self.transport.regions == {}


def sending(**how) -> tuple[World, FakeReceiver]:
    """A world, made so, in which request "a" has been offered, asked for and begun to be sent."""
    world = World(**how)
    receiver = world.receiver()
    world.offer("a", 37)
    receiver.ask("a", 37)
    world.step()
    return world, receiver
