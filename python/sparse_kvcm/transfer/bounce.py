"""The bounce region: many small pages become one range, and pages again on the other side.

An engine asks some microseconds for each descriptor, whatever its size. Between two GPUs small
pages are therefore gathered into registered memory here, sent as one range, and scattered there by
the receiver. Memory of a host bypasses it: that is a copy on the wrong side of the link.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from sparse_kvcm._core import InvalidArgument
from sparse_kvcm.transfer.copier import Copier, Copy, gathered
from sparse_kvcm.transfer.transport import SIZE, TARGET, Ranges, Region, Route
from sparse_kvcm.transfer.wire import BounceGrant, TransferGroup

ALIGNMENT = 256
MAX_SCATTERED = 1 << 18  # ranges: a message has 16 bytes for each


@dataclass
class Bounce:
    """A region for gathering, and which of it is in use.

    Attributes
    ----------
    region : Region
        VRAM of this process; the sender registers it.
    copier : Copier
        Copies within the GPU.
    min_bytes : int
        Groups with less go directly.
    max_range_bytes : int
        Groups whose ranges are longer on average go directly, too.
    """

    region: Region
    copier: Copier
    min_bytes: int = 2 << 20
    max_range_bytes: int = 64 << 10
    _taken: dict[int, int] = field(default_factory=dict)  # end by begin

    def __post_init__(self) -> None:
        if self.region.memory != "VRAM":
            raise InvalidArgument(
                f"[Bounce] region must be VRAM, got {self.region.memory}: host memory bypasses it"
            )

    @property
    def bytes_in_use(self) -> int:
        """Of the region."""
        return sum(end - begin for begin, end in self._taken.items())

    def suits(self, route: Route, ranges: Ranges, grant: BounceGrant | None) -> bool:
        """Whether a group is one for the region, and has room on the target."""
        if (route.source, route.target) != ("VRAM", "VRAM") or grant is None:
            return False
        if route.source_device != self.region.device:
            return False
        size = int(ranges[:, SIZE].sum())
        small = size <= len(ranges) * self.max_range_bytes and 1 < len(ranges) <= MAX_SCATTERED
        return small and self.min_bytes <= size <= grant.size

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

    def gather(self, ranges: Ranges, address: int) -> Copy:
        """Start to copy the sources of `ranges` side by side to `address`."""
        return self.copier.start(gathered(ranges, address))


def bounced(ranges: Ranges, address: int, grant: BounceGrant) -> Ranges:
    """The one range that a gathered group is sent as."""
    return np.array([[address, grant.address, int(ranges[:, SIZE].sum())]], np.uint64)


def describe(route: Route, ranges: Ranges, bounce_dst_base: int | None = None) -> TransferGroup:
    """What a result says of a group; `ranges` as they belong, gathered or not.

    Raises
    ------
    InvalidArgument
        If a group that touches DRAM has a bounce region.
    """
    if bounce_dst_base is None:
        num_bytes = int(ranges[:, SIZE].sum())
        return TransferGroup(route.source, route.target, len(ranges), num_bytes)
    if (route.source, route.target) != ("VRAM", "VRAM"):
        raise InvalidArgument(
            f"[describe] bounce_dst_base must be None for ({route.source}, {route.target}): host "
            f"memory bypasses the bounce region, got {bounce_dst_base:#x}"
        )
    scatter = np.ascontiguousarray(ranges[:, [TARGET, SIZE]], "<u8").tobytes()
    num_bytes = int(ranges[:, SIZE].sum())
    return TransferGroup(route.source, route.target, 1, num_bytes, bounce_dst_base, scatter)
