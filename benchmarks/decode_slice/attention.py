"""Attention of the slice: `sparse_mla_decode` on a GPU, the same in torch on a CPU."""

from __future__ import annotations

import torch

from benchmarks.decode_slice.cache import Buffer
from benchmarks.decode_slice.model import SliceModel
from sparse_kvcm.models import DeepSeekV4Geometry

FP8 = torch.float8_e4m3fn


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
        if not q.is_cuda:
            return self._in_torch(q, units, slots, window)
        from sparse_kvcm.attention.sparse_mla import KeyPart, sparse_mla_decode

        part = None
        if window is not None:
            part = KeyPart(window[0].pages, window[1], self._layout(window[0].units))
        return sparse_mla_decode(
            q,
            units.pages,
            slots,
            layout=self._layout(units.units),
            softmax_scale=self._model.softmax_scale,
            window=part,
        )

    def _layout(self, units: int):  # type: ignore[no-untyped-def]
        from sparse_kvcm.attention.layouts import dsa_layout, v4_layout

        geometry = self._model.geometry
        if isinstance(geometry, DeepSeekV4Geometry):
            return v4_layout(geometry, "fp8", units)
        return dsa_layout(geometry, "fp8", units)

    def _in_torch(
        self,
        q: torch.Tensor,
        units: Buffer,
        slots: torch.Tensor,
        window: tuple[Buffer, torch.Tensor] | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [(units, slots)] if window is None else [window, (units, slots)]
        keys = torch.cat([self._gather(*part) for part in parts], 1)
        exists = torch.cat([part[1] >= 0 for part in parts], 1)
        scores = torch.einsum("bhw,bkw->bhk", q.float(), keys) * self._model.softmax_scale
        scores = scores.masked_fill(~exists[:, None], -torch.inf)
        sums = scores.logsumexp(-1)
        weights = (scores - sums[..., None]).exp().nan_to_num(0.0)
        out = torch.einsum("bhk,bkl->bhl", weights, keys[..., : self._model.latent])
        return out.to(torch.bfloat16), sums

    def _gather(self, units: Buffer, slots: torch.Tensor) -> torch.Tensor:
        width = self._model.width
        slot = slots.clamp(min=0).long()
        page, unit = slot // units.units, slot % units.units
        pages = units.pages[:, : units.units * width].unflatten(1, (units.units, width))
        return pages[page, unit].view(FP8).float()


def merge(
    one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Merge attention over two sets of units, outputs ``[b, heads, latent]`` with their sums.

    The bound against attention over both at once is one rounding to BF16 of each partial result.
    """
    (a, a_sum), (b, b_sum) = one, other
    weight = torch.sigmoid(a_sum - b_sum).nan_to_num(0.0)[..., None]  # nan: neither has units
    return torch.lerp(b.float(), a.float(), weight).to(a.dtype)
