"""How many units of a selection a cache of given size misses.

Shares of misses under LRU at caches of 1, 2 and 4 selections, of a history of so many selections.
Between these the share follows the straight line through the logarithms of the nearest two, and
beyond the last as well. Longer histories miss more: as much more as the drift model of
`benchmarks/traces.py` does, which keeps these shares whatever k is.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

from sparse_kvcm._core import InvalidArgument

FACTORS = (1.0, 2.0, 4.0)
# Units of a history, in selections.
SPREADS = (4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)
# Shares at FACTORS for each of SPREADS: the drift model, exact LRU, k = 512, 60 steps after 60,
# mean of two random states. At 4 of 4 nothing is missed but what is new.
DRIFT = {
    "glm51": (
        (0.176, 0.029, 0.001), (0.225, 0.066, 0.015), (0.267, 0.101, 0.040), (0.301, 0.132, 0.065),
        (0.332, 0.167, 0.096), (0.361, 0.197, 0.127), (0.393, 0.229, 0.156), (0.413, 0.253, 0.180),
    ),
    "v32_mid": (
        (0.327, 0.081, 0.002), (0.414, 0.178, 0.041), (0.482, 0.264, 0.114), (0.539, 0.336, 0.183),
        (0.585, 0.401, 0.253), (0.631, 0.464, 0.322), (0.672, 0.521, 0.389), (0.699, 0.562, 0.439),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Locality:
    """A measured or modelled miss curve.

    Attributes
    ----------
    name : str
    misses : tuple of float
        Share of the selection that misses, at `FACTORS`.
    spread : float
        Units of the history that they are for, in selections.
    drift : str
        The model of `DRIFT` that says what other lengths miss.
    source : str
    """

    name: str
    misses: tuple[float, float, float]
    spread: float
    drift: str
    source: str

    def miss_share(self, factor: float, spread: float | None = None) -> float:
        """Share of a selection that misses in a cache of `factor` selections, in [0, 1].

        Parameters
        ----------
        factor : float
        spread : float, optional
            Units of the history in selections; without it those that the curve is for.
        """
        share = _on_curve(FACTORS, self.misses, factor)
        if spread is not None and spread != self.spread:
            share *= self._drift_share(factor, spread) / self._drift_share(factor, self.spread)
        return min(1.0, share)

    def _drift_share(self, factor: float, spread: float) -> float:
        within = min(max(spread, SPREADS[0]), SPREADS[-1])
        shares = [_on_curve(FACTORS, misses, factor) for misses in DRIFT[self.drift]]
        return _on_curve(SPREADS, shares, within)


def _on_curve(places: Sequence[float], shares: Sequence[float], at: float) -> float:
    """Straight lines through logarithms of both."""
    index = min(max(bisect.bisect_right(places, at) - 1, 0), len(places) - 2)
    low, high = (math.log(share) for share in shares[index : index + 2])
    begin, end = (math.log(known) for known in places[index : index + 2])
    return math.exp(low + (math.log(at) - begin) / (end - begin) * (high - low))


LOCALITIES = {
    locality.name: locality
    for locality in (
        Locality(
            "glm51", (0.300, 0.134, 0.067), 32, "glm51",
            "arXiv 2608.07009, GLM-5.1 on LongBench-v2, taken for 65,536 tokens",
        ),
        Locality(
            "v32_mid", (0.546, 0.345, 0.192), 32, "v32_mid",
            "drift model, 45 % overlap of arXiv 2604.22312, 65,536 tokens",
        ),
        Locality(
            "v4_flash", (0.332, 0.166, 0.095), 64, "glm51",
            "drift model fitted to the GLM-5.1 figures, 128K tokens, not verified",
        ),
        Locality(
            "v4_pro", (0.390, 0.228, 0.154), 256, "glm51",
            "drift model fitted to the GLM-5.1 figures, 1M tokens, not verified",
        ),
    )
}  # fmt: skip
_OF_MODELS = {
    "deepseek-v3.2": "v32_mid",
    "deepseek-v4-flash": "v4_flash",
    "deepseek-v4-pro": "v4_pro",
}


def find_locality(name: str | None, model: str) -> Locality:
    """The curve of that name, or the one that is nearest to the model.

    Raises
    ------
    InvalidArgument
        If there is none of that name.
    """
    name = _OF_MODELS.get(model, "glm51") if name is None else name
    if name not in LOCALITIES:
        raise InvalidArgument(
            f"[find_locality] locality must be one of {', '.join(LOCALITIES)}, got {name!r}"
        )
    return LOCALITIES[name]
