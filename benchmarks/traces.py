"""Synthetic selections with the locality of real indexers: the drift model.

A unit's score is a sum of normal fields: one that stays, one that drifts (AR(1), correlation `rho`
per step), one that is new in every step, and one that moves with the newest unit. The newest unit
itself is always selected. The presets give the miss rates that are published for these models:

    glm51      HiSparse, GLM-5.1 on LongBench-v2: LRU misses 30.0, 13.4, 6.7 % at k, 2k, 4k slots
    v32_mid    layers 20 to 60 of DeepSeek-V3.2: 44 % of a selection is in the next one
    v32_first  its layers 0 and 1: 1.5 %; the pattern moves with the query
    calm       the layers of ESS with the fewest misses: 17 a step at 6.4K slots, 32K units
    restless   those with the most: 605
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

NEWEST = 9.0  # what the newest unit's score gets on top


@dataclass(frozen=True)
class Preset:
    """Weights of the fields' variances; what the others leave drifts."""

    stays: float
    rho: float
    fresh: float
    moves: float = 0.0

    @property
    def drifts(self) -> float:
        """The share that drifts."""
        return max(0.0, 1.0 - self.stays - self.fresh - self.moves)


PRESETS = {
    "glm51": Preset(0.70, 0.90, 0.03),
    "v32_mid": Preset(0.62, 0.80, 0.15),
    "v32_first": Preset(0.00, 0.50, 0.04, moves=0.94),
    "calm": Preset(0.90, 0.95, 0.006),
    "restless": Preset(0.45, 0.80, 0.35),
}


class DriftTraces:
    """Independent traces of many rows, such as each selection group of each request.

    Parameters
    ----------
    preset : Preset
    rows : int
    units : int
        Most units that a row will have.
    k : int
        Units of a selection.
    seed : int
    device : str
        Where the fields live: rows x units x 16 bytes, and as much again while a step is made.
    """

    def __init__(
        self, preset: Preset, rows: int, units: int, k: int, seed: int, device: str = "cpu"
    ) -> None:
        self._preset, self._k = preset, k
        self._shape = (rows, units)
        self._random = torch.Generator(device).manual_seed(seed)
        self._device = device
        self._stays, self._drifts = self._field(), self._field()
        self._moves = self._field() if preset.moves else None
        self._ordinals = torch.arange(units, device=device)

    def step(self, lengths: torch.Tensor) -> torch.Tensor:
        """Select units in [0, length) of each row.

        Parameters
        ----------
        lengths : torch.Tensor, int64, shape (rows,)
            At least 1, at most `units`.

        Returns
        -------
        torch.Tensor, int32, shape (rows, k)
            In no order; -1 where a row has fewer units.
        """
        scores = self.scores(lengths)
        k = min(self._k, self._shape[1])
        best, chosen = scores.topk(k, sorted=False)
        selection = chosen.int().masked_fill_(best == -torch.inf, -1)
        return torch.nn.functional.pad(selection, (0, self._k - k), value=-1)

    def scores(self, lengths: torch.Tensor) -> torch.Tensor:
        """The scores that `step` selects by, float32 ``[rows, units]``; a step of its own."""
        one = self._preset
        self._drifts.mul_(one.rho).add_(self._field(), alpha=(1 - one.rho**2) ** 0.5)
        scores = self._field().mul_(one.fresh**0.5)
        scores.add_(self._stays, alpha=one.stays**0.5)
        scores.add_(self._drifts, alpha=one.drifts**0.5)
        newest = lengths[:, None] - 1
        if self._moves is not None:
            distance = (newest - self._ordinals).clamp_(min=0)
            scores.add_(self._moves.gather(1, distance), alpha=one.moves**0.5)
        bonus = torch.full(newest.shape, NEWEST, device=self._device)
        scores.scatter_add_(1, newest, bonus)
        return scores.masked_fill_(self._ordinals > newest, -torch.inf)

    def _field(self) -> torch.Tensor:
        return torch.randn(self._shape, generator=self._random, device=self._device)
