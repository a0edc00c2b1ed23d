"""Selected units side by side in memory, for kernels that cannot read single ones: NVFP4's.

Such kernels read whole tiles of 128 rows, so rows behind the last one, and rows without a unit, are
zero: neither NaN nor what another step has left there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from sparse_kvcm._core import InvalidArgument, UnitLayout
from sparse_kvcm.adapter.slot_mapping import PageGeometry
from sparse_kvcm.attention import _requirements
from sparse_kvcm.attention.checks import check_region, check_tensor, power_of_two
from sparse_kvcm.attention.layouts import RecordLayout
from sparse_kvcm.models.kv_scratch import scratch_rows

if TYPE_CHECKING:
    import torch

_ROWS = 16  # of one program


class KvScratch:
    """Copies of what a step's selections name, used by one layer after the other.

    Parameters
    ----------
    layout : RecordLayout
        Of the units, in the pages that they are copied from.
    max_rows, top_k : int
        Largest selections.
    device : str

    Attributes
    ----------
    layout : RecordLayout
        The same records in one page of `scratch_rows` units: row i is slot i.
    memory : torch.Tensor, uint8, shape (1, bytes)
        That page: all rows' first region, then all rows' second.
    """

    def __init__(self, layout: RecordLayout, max_rows: int, top_k: int, device: str) -> None:
        import torch

        for name, value in (("max_rows", max_rows), ("top_k", top_k)):
            if value < 1:
                raise InvalidArgument(f"[KvScratch] {name} must be >= 1, got {value}")
        self._source, self._most = layout, (max_rows, top_k)
        unit = UnitLayout(layout.page.layout.region_bytes)
        self.layout = replace(layout, page=PageGeometry(unit, scratch_rows(max_rows, top_k)))
        size = self.layout.page.page_bytes
        self.memory = torch.zeros((1, size), dtype=torch.uint8, device=device)

    def fill(self, buffers: Sequence[torch.Tensor], slots: torch.Tensor) -> None:
        """Copy the units at slots of one layer; the unit at ``slots[i, j]`` becomes row i * k + j.

        Parameters
        ----------
        buffers : sequence of torch.Tensor
            Of the layer, as in `RecordLayout.regions`.
        slots : torch.Tensor, int32 or int64, shape (b, k)
            As `select` gives them; -1 gives a row of zeros.

        Raises
        ------
        InvalidArgument
            If an argument does not fit.
        """
        check_tensor("KvScratch.fill", "slots", slots, ("int32", "int64"), (None, None))
        (b, k), device = slots.shape, self.memory.device
        if b > self._most[0] or k > self._most[1] or slots.device != device:
            raise InvalidArgument(
                f"[KvScratch.fill] slots must be at most {self._most} on {device}, got "
                f"{tuple(slots.shape)} on {slots.device}"
            )
        sources, targets = self._source.regions(buffers), self.layout.regions([self.memory])
        for region in sources:
            check_region("KvScratch.fill", region, device)
        kernels = _requirements.kernels("gather")
        units = self._source.units_per_page
        with _requirements.launches_on("KvScratch.fill", "slots", slots):
            for source, target in zip(sources, targets, strict=True):
                words = source.unit_bytes // 4
                kernels.gather_region[(scratch_rows(b, max(k, 1)) // _ROWS,)](
                    slots,
                    source.pages,
                    target.pages[:, target.offset :],
                    max(k, 1),
                    b * k,
                    min(len(one.pages) for one in sources) * units,
                    slots.stride(0),
                    source.page_stride,
                    source.offset,
                    UNITS=units,
                    WORDS=words,
                    ROWS=_ROWS,
                    BLOCK=power_of_two(words),
                )
