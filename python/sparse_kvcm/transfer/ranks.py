"""Which rank sends: with replicated pages every source rank has them all, and one must.

A pure function of ranks, so both sides compute it and compare nothing. Balanced: no source rank
serves more than ceil(targets / sources) targets.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from sparse_kvcm._core import InvalidArgument
from sparse_kvcm.transfer.page_table import Struct

_Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 20)]


class RankInfo(Struct, frozen=True):
    """Where a process stands among those that serve one model.

    Attributes
    ----------
    rank, num_ranks : int
    parallel : {"tensor", "attention_dp"}
        tensor: every rank has the pages of every request. attention_dp: one rank has a request's.
    """

    rank: _Rank = 0
    num_ranks: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 1
    parallel: Literal["tensor", "attention_dp"] = "tensor"


def check_rank(info: RankInfo) -> None:
    """Refuse a rank outside its number.

    Raises
    ------
    InvalidArgument
    """
    if not 0 <= info.rank < info.num_ranks:
        raise InvalidArgument(f"[RankInfo] rank must be in [0, {info.num_ranks}), got {info.rank}")


def sending_rank(num_sources: int, num_targets: int, target: int) -> int:
    """The source rank that sends to a target rank, of ranks that all have the same pages.

    Examples
    --------
    >>> [sending_rank(4, 2, target) for target in range(2)]
    [0, 2]
    >>> [sending_rank(2, 5, target) for target in range(5)]
    [0, 1, 0, 1, 0]
    """
    check_rank(RankInfo(target, num_targets))
    if num_sources >= num_targets:
        return target * num_sources // num_targets
    return target % num_sources


def sends_to(source: RankInfo, target: RankInfo) -> bool:
    """Whether `source` is the rank that sends a request's pages, if it has them, to `target`.

    With attention DP on the source one rank has a request, and sends it wherever it goes.
    """
    check_rank(source)
    check_rank(target)
    if source.parallel == "attention_dp":
        return True
    return sending_rank(source.num_ranks, target.num_ranks, target.rank) == source.rank
