"""The bounce region: many small pages become one range, and pages again on the other side.

An engine asks some microseconds for each descriptor, whatever its size. Between two GPUs small
pages are therefore gathered into registered memory of the sender, sent as one range into registered
memory of the receiver, and scattered there. Memory of a host bypasses it: that is a copy on the
wrong side of the link.

    receiver   grants a part of its region with its RequestData
    sender     gathers in the order of `Projection.pieces`, sends, says bounce_dst_base
    receiver   scatters by its own `Projection.places`: of where bytes belong it is told nothing
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sparse_kvcm._core import InvalidArgument
from sparse_kvcm.transfer.copier import Copier, Copy, CudaCopier, gathered, scattered
from sparse_kvcm.transfer.transport import SIZE, Parts, Ranges, Region, Route, joined
from sparse_kvcm.transfer.wire import BounceGrant, TransferGroup

ALIGNMENT = 256
MOST_OF_FREE = 4  # a region takes no more than this part of a GPU's free memory: two take a half
GPU_ROUTE = ("VRAM", "VRAM")


@dataclass
class Bounce:
    """A region for gathering or scattering, and which of it is in use.

    Attributes
    ----------
    region : Region
        VRAM of this process; the sender or receiver registers it.
    copier : Copier
        Copies within the GPU.
    min_bytes : int
        Groups with less go directly.
    max_range_bytes : int
        Groups whose ranges are longer on average go directly, too.
    memory : object
        Keeps the region alive.
    """

    region: Region
    copier: Copier
    min_bytes: int = 2 << 20
    max_range_bytes: int = 64 << 10
    memory: object = None
    _taken: dict[int, int] = field(default_factory=dict)  # end by begin

    def __post_init__(self) -> None:
        if self.region.memory != "VRAM":
            raise InvalidArgument(
                f"[Bounce] region must be VRAM, got {self.region.memory}: host memory bypasses it"
            )

    @classmethod
    def on_gpu(cls, device: int, num_bytes: int, **options: Any) -> Bounce | None:
        """A region on a GPU, of `num_bytes` or a quarter of what is free, whichever is less.

        To be made before the cache is sized, which then finds less. `options` are attributes.

        Returns
        -------
        Bounce or None
            None for 0 bytes: all pages go directly.

        Raises
        ------
        InvalidArgument
            If no bytes are left.
        """
        import torch

        if num_bytes == 0:
            return None
        size = min(num_bytes, torch.cuda.mem_get_info(device)[0] // MOST_OF_FREE)
        if size < ALIGNMENT:
            raise InvalidArgument(
                f"[Bounce] num_bytes must be >= {ALIGNMENT}, got {num_bytes}, of which cuda:"
                f"{device} has room for {size}; with 0 pages go directly"
            )
        memory = torch.empty(size, dtype=torch.uint8, device=f"cuda:{device}")
        region = Region(memory.data_ptr(), size, "VRAM", device)
        return cls(region, CudaCopier(device), memory=memory, **options)

    @property
    def bytes_in_use(self) -> int:
        """Of the region."""
        return sum(end - begin for begin, end in self._taken.items())

    def suits(self, route: Route, ranges: Ranges, grant: BounceGrant | None) -> bool:
        """Whether a group is one for the region, and has room on the target."""
        if (route.source, route.target) != GPU_ROUTE or grant is None:
            return False
        if route.source_device != self.region.device:
            return False
        return self._is_worthwhile(ranges[:, SIZE]) and int(ranges[:, SIZE].sum()) <= grant.size

    def land(self, places: Mapping[Route, Parts]) -> Landing | None:
        """Room for what is to arrive at `places`, if that should be gathered and there is room.

        There must be one route between GPUs, so that none can be mistaken for another.
        """
        routes = [route for route in places if (route.source, route.target) == GPU_ROUTE]
        if len(routes) != 1 or routes[0].target_device != self.region.device:
            return None
        wanted = places[routes[0]]
        sizes = np.concatenate([one[:, 1] for one in wanted])
        if not self._is_worthwhile(sizes):
            return None
        size = int(sizes.sum())
        address = self.take(size)
        return None if address is None else Landing(self, address, size, wanted)

    def take(self, size: int) -> int | None:
        """An address with so many bytes, or None if there is no room now."""
        begin = self.region.address
        for taken, end in sorted(self._taken.items()):
            if begin + size <= taken:
                break
            begin = max(begin, -(-end // ALIGNMENT) * ALIGNMENT)
        if begin + size > self.region.address + self.region.size:
            return None
        self._taken[begin] = begin + size
        return begin

    def give_back(self, address: int) -> None:
        """Return what `take` gave; nothing may read or write it any more."""
        del self._taken[address]

    def gather(self, pieces: Parts, address: int) -> Copy:
        """Start to copy the sources of `pieces` side by side to `address`."""
        begins = _begins(address, [one[:, SIZE] for one in pieces])
        parts = [joined(gathered(*one)) for one in zip(pieces, begins, strict=True)]
        return self.copier.start(np.concatenate(parts))

    def _is_worthwhile(self, sizes: Ranges) -> bool:
        total = int(sizes.sum())
        small = total <= len(sizes) * self.max_range_bytes and len(sizes) > 1
        return small and total >= self.min_bytes


@dataclass
class Landing:
    """A part of a receiver's region, granted to one slice: the peer's until its result is here.

    Attributes
    ----------
    address, size : int
    places : Parts
        Where its bytes belong, in the order in which they arrive: see `Projection.places`.
    """

    bounce: Bounce
    address: int
    size: int
    places: Parts

    @property
    def grant(self) -> BounceGrant:
        """What the peer is told."""
        return BounceGrant(self.address, self.size)

    def scatter(self) -> Copy:
        """Start to copy what has arrived to where it belongs."""
        begins = _begins(self.address, [one[:, 1] for one in self.places])
        parts = [joined(scattered(*one)) for one in zip(begins, self.places, strict=True)]
        return self.bounce.copier.start(np.concatenate(parts))

    def end(self) -> None:
        """Nobody writes to it or reads from it any more."""
        self.bounce.give_back(self.address)


def bounced_groups(groups: Sequence[TransferGroup], landing: Landing | None) -> tuple[int, str]:
    """How many groups lie in a landing, and what is wrong with what a peer says of it, or nothing.

    It must be none, or all that was granted.
    """
    found = [one for one in groups if one.bounce_dst_base is not None]
    if not found:
        return 0, ""
    if landing is None:
        return len(found), "bounce_dst_base of a peer must be None without a grant"
    facts = [(one.bounce_dst_base, one.num_bytes) for one in found]
    wanted = [(landing.address, landing.size)]
    if facts != wanted:
        return len(found), f"bounce_dst_base and num_bytes of a peer must be {wanted}, got {facts}"
    return 1, ""


def bounced(ranges: Ranges, address: int, grant: BounceGrant) -> Ranges:
    """The one range that a gathered group is sent as."""
    return np.array([[address, grant.address, int(ranges[:, SIZE].sum())]], np.uint64)


def describe(route: Route, ranges: Ranges, bounce_dst_base: int | None = None) -> TransferGroup:
    """What a result says of a group; `ranges` as the engine was given them.

    Raises
    ------
    InvalidArgument
        If a group that touches DRAM has a bounce region.
    """
    if bounce_dst_base is not None and (route.source, route.target) != GPU_ROUTE:
        raise InvalidArgument(
            f"[describe] bounce_dst_base must be None for ({route.source}, {route.target}): host "
            f"memory bypasses the bounce region, got {bounce_dst_base:#x}"
        )
    num_bytes = int(ranges[:, SIZE].sum())
    return TransferGroup(route.source, route.target, len(ranges), num_bytes, bounce_dst_base)


def _begins(address: int, sizes: Sequence[Ranges]) -> list[int]:
    """Where each part begins, of parts that lie side by side from `address` on."""
    ends = np.cumsum([int(one.sum()) for one in sizes])
    return [address, *(address + ends[:-1]).tolist()]
