"""Attention of the slice: the library's, in Triton on a GPU and in torch on a CPU."""

from __future__ import annotations

import torch

from benchmarks.decode_slice.cache import Buffer
from benchmarks.decode_slice.model import SliceModel
from sparse_kvcm.attention.layouts import RecordLayout, dsa_layout, v4_layout
from sparse_kvcm.attention.mla_torch import sparse_mla_torch
from sparse_kvcm.attention.sparse_mla import KeyPart, sparse_mla_decode
from sparse_kvcm.models import DeepSeekV4Geometry


class Attention:
    """One query per row over the units that slots name, for the layers of a slice."""

    def __init__(self, model: SliceModel) -> None:
        self._model = model

    def __call__(
        self,
        q: torch.Tensor,
        units: Buffer,
        slots: torch.Tensor,
        window: tuple[Buffer, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Attend to units, and to those of a window beside them.

        Parameters
        ----------
        q : torch.Tensor, bfloat16, shape (b, heads, width)
        units : Buffer
        slots : torch.Tensor, int32, shape (b, k)
            -1 = none.
        window : tuple of Buffer and torch.Tensor, optional
            A DeepSeek-V4 layer's, with slots.

        Returns
        -------
        torch.Tensor, bfloat16, shape (b, heads, latent)
        """
        return self.with_sums(q, units, slots, window)[0]

    def with_sums(
        self,
        q: torch.Tensor,
        units: Buffer,
        slots: torch.Tensor,
        window: tuple[Buffer, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, and the logarithms of the sums of weights, float32 ``[b, heads]``."""
        part = None
        if window is not None:
            part = KeyPart(window[0].pages, window[1], self._layout(window[0].units))
        attend = sparse_mla_decode if q.is_cuda else sparse_mla_torch
        return attend(
            q,
            units.pages,
            slots,
            layout=self._layout(units.units),
            softmax_scale=self._model.softmax_scale,
            window=part,
        )

    def _layout(self, units: int) -> RecordLayout:
        geometry = self._model.geometry
        if isinstance(geometry, DeepSeekV4Geometry):
            return v4_layout(geometry, "fp8", units)
        return dsa_layout(geometry, "fp8", units)


def merge(
    one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Merge attention over two sets of units, outputs ``[b, heads, latent]`` with their sums.

    The bound against attention over both at once is one rounding to BF16 of each partial result.
    """
    (a, a_sum), (b, b_sum) = one, other
    weight = torch.sigmoid(a_sum - b_sum).nan_to_num(0.0)[..., None]  # nan: neither has units
    return torch.lerp(b.float(), a.float(), weight).to(a.dtype)
