"""How many units of a selection a cache of given size misses.

Shares of misses under LRU at caches of 1, 2 and 4 selections. Between and beyond these the share
follows the straight line through the logarithms of the nearest two.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass

from sparse_kvcm._core import InvalidArgument


@dataclass(frozen=True)
class Locality:
    """A measured or modelled miss curve.

    Attributes
    ----------
    name : str
    misses : tuple of float
        Share of the selection that misses, at `FACTORS`.
    source : str
    """

    name: str
    misses: tuple[float, float, float]
    source: str

    def miss_share(self, factor: float) -> float:
        """Share of a selection that misses in a cache of `factor` selections, in [0, 1]."""
        index = min(max(bisect.bisect_right(FACTORS, factor) - 1, 0), len(FACTORS) - 2)
        low, high = (math.log(share) for share in self.misses[index : index + 2])
        begin, end = (math.log(known) for known in FACTORS[index : index + 2])
        weight = (math.log(factor) - begin) / (end - begin)
        return min(1.0, math.exp(low + weight * (high - low)))


FACTORS = (1.0, 2.0, 4.0)

_DRIFT = "drift model fitted to the GLM-5.1 figures"
LOCALITIES = {
    locality.name: locality
    for locality in (
        Locality("glm51", (0.300, 0.134, 0.067), "arXiv 2608.07009, GLM-5.1 on LongBench-v2"),
        Locality("v32_mid", (0.546, 0.345, 0.192), "drift model, 45 % overlap of arXiv 2604.22312"),
        Locality("v4_flash", (0.332, 0.166, 0.095), f"{_DRIFT}, 128K tokens, not verified"),
        Locality("v4_pro", (0.390, 0.228, 0.154), f"{_DRIFT}, 1M tokens, not verified"),
    )
}
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
