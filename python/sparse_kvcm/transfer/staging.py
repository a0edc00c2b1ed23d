"""Staging: pinned slots in which history arrives as a prefill has it, layer by layer.

A slot has one page of every offloaded buffer, in the order of layers, side by side: where the
source's slots look the same, a slot arrives as one range. It is a ring in that few slots serve any
history: a slice of it takes some, and they are free again as soon as it is repacked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from sparse_kvcm._core import InvalidArgument
from sparse_kvcm.transfer.page_table import Pool
from sparse_kvcm.transfer.tables import Buffer

_ALIGNMENT = 4096


class StagingRing:
    """Slots in host memory.

    Parameters
    ----------
    buffers : sequence of Buffer
        Offloaded ones, all of one page size.
    num_slots : int
        At least 1. What they take comes out of ``host_history_size``: `Workload.staging_slots`.
    is_pinned : bool
        As copies from a GPU need it; takes torch.

    Attributes
    ----------
    slots : ndarray, uint8, shape (num_slots, slot_bytes)
    placed : tuple of (Buffer, int)
        Offset of each buffer in a slot.
    """

    def __init__(self, buffers: Sequence[Buffer], num_slots: int, *, is_pinned: bool) -> None:
        if num_slots < 1:
            raise InvalidArgument(f"[StagingRing] num_slots must be >= 1, got {num_slots}")
        self.placed = _place(buffers)
        self.slot_bytes = _slot_bytes(buffers)
        self._memory = _allocate(num_slots * self.slot_bytes + _ALIGNMENT, is_pinned)
        begin = -self._memory.ctypes.data % _ALIGNMENT
        self.slots = self._memory[begin : begin + num_slots * self.slot_bytes].reshape(
            num_slots, self.slot_bytes
        )
        self._free = set(range(num_slots))

    @property
    def pool(self) -> Pool:
        """As a page table has it."""
        return Pool(self.slots.ctypes.data, self.slot_bytes, len(self.slots), "DRAM")

    @property
    def num_bytes(self) -> int:
        """All that it takes."""
        return len(self._memory)

    @property
    def num_free(self) -> int:
        """Slots that can be had now."""
        return len(self._free)

    def may_take(self, count: int, held: int, num_peers: int) -> bool:
        """Whether a peer may get `count` slots, that may write to `held`.

        Of several peers each may have a slice, and more if it leaves as many slots as it has then:
        what those that stall hold is never all.
        """
        left = self.num_free - count
        return left >= 0 and (num_peers < 2 or held == 0 or held + count <= left)

    def largest_slice(self, num_peers: int) -> int:
        """Most slots of a slice: with several peers there is room for two."""
        return max(1, len(self.slots) // 2) if num_peers > 1 else len(self.slots)

    def take(self, count: int) -> list[int]:
        """The lowest free slots, so that they lie side by side where they can."""
        taken = sorted(self._free)[:count]
        if len(taken) < count:
            raise InvalidArgument(f"[take] count must be <= {len(taken)}, got {count}")
        self._free.difference_update(taken)
        return taken

    def give_back(self, slots: Iterable[int]) -> None:
        """Return slots that nobody writes to or reads from any more."""
        self._free.update(slots)

    def offsets(self, group: int) -> list[int]:
        """Where the regions of a selection group's members lie in a slot, member by member."""
        found = [(one.member, one.region, one, at) for one, at in self.placed if one.group == group]
        return [
            at + region.offset
            for _, _, one, at in sorted(found, key=lambda item: item[:2])
            for region in one.format.regions
        ]


def _place(buffers: Sequence[Buffer]) -> tuple[tuple[Buffer, int], ...]:
    offset, placed = 0, []
    for one in buffers:
        placed.append((one, offset))
        offset += one.format.page_bytes
    return tuple(placed)


def _slot_bytes(buffers: Sequence[Buffer]) -> int:
    return sum(one.format.page_bytes for one in buffers)


def _allocate(size: int, is_pinned: bool) -> np.ndarray:
    if not is_pinned:
        return np.zeros(size, np.uint8)
    import torch

    memory: np.ndarray = torch.zeros(size, dtype=torch.uint8, pin_memory=True).numpy()
    return memory
