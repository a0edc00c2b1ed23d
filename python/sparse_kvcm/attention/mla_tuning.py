"""How `sparse_mla` divides its work: constants per layout and number of heads, and what they give.

Everything here is a function of shapes alone, so that a resident and an offloaded run, which have
the same shapes, add up in the same order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sparse_kvcm._core import InvalidArgument

FLOAT_BYTES = 4


@dataclass(frozen=True)
class Tuning:
    """Constants of a launch.

    Attributes
    ----------
    block : int
        Units that are multiplied at once, a power of two from 16 on.
    num_warps, num_stages : int
        Of Triton.
    programs : int
        At work at once on the whole GPU. A constant, not the GPU's: results do not depend on it.

    Raises
    ------
    InvalidArgument
        For numbers that Triton does not take.
    """

    block: int
    num_warps: int
    num_stages: int
    programs: int

    def __post_init__(self) -> None:
        least = {"block": 16, "num_warps": 1, "num_stages": 1, "programs": 1}
        for name, low in least.items():
            value = getattr(self, name)
            power = name not in ("block", "num_warps") or value & (value - 1) == 0
            if value < low or not power:
                rule = "a power of two" if name in ("block", "num_warps") else "an int"
                raise InvalidArgument(f"[Tuning] {name} must be {rule} >= {low}, got {value}")


# By heads of a program and name of the layout of the selected units: the fastest on an H200 of
# `scripts/bench_attention --tune`. 64 queries take 72 KB of shared memory, so one program on each
# of 132 multiprocessors, or two with fewer heads. Where scales or E2M1 are unpacked, registers bind
# before loads do: one stage, with nothing loaded ahead, is as fast or faster.
_FEW_HEADS = Tuning(32, 4, 5, 264)
TUNING: dict[tuple[int, str], Tuning] = {
    (64, "dsa/bf16"): Tuning(64, 8, 3, 132),
    (64, "dsa/fp8"): Tuning(64, 8, 3, 132),
    (64, "dsa/fp8_ds_mla"): Tuning(64, 8, 2, 132),
    (64, "dsa/nvfp4"): Tuning(64, 8, 2, 132),
    (64, "dsa/nvfp4_ds_mla"): Tuning(64, 8, 1, 132),
    (64, "v4/bf16"): Tuning(64, 8, 3, 132),
    (64, "v4/fp8"): Tuning(64, 8, 2, 132),
    (64, "v4/fp8_ds_mla"): Tuning(64, 8, 3, 132),
    (64, "v4/nvfp4"): Tuning(32, 8, 1, 132),
}
MOST_HEADS = 64  # of a program: float32 sums of 64 heads x 512 values are half of the registers
LEAST_HEADS = 16  # of a matrix product


def heads_of_program(heads: int) -> int:
    """Heads that a program computes at once: a power of two."""
    return min(MOST_HEADS, max(LEAST_HEADS, 1 << (heads - 1).bit_length()))


def tuning_of(heads: int, layout: str) -> Tuning:
    """The constants for so many heads and a layout, by its name."""
    return TUNING.get((heads_of_program(heads), layout), _FEW_HEADS)


@dataclass(frozen=True)
class WorkPlan:
    """How the blocks of all rows are dealt to programs.

    Attributes
    ----------
    blocks : tuple of int
        Blocks of a row, part by part.
    per_program : int
        Consecutive blocks of a program; rows lie one behind the other.
    programs : int
        For one group of heads.
    pieces : int
        Places for parts of rows that a border cuts; 0 if none is cut.
    """

    blocks: tuple[int, ...]
    per_program: int
    programs: int
    pieces: int

    def workspace_bytes(self, heads: int, value_width: int) -> int:
        """Sums, the largest score and the sum of weights of every head in every place."""
        return self.pieces * heads * (value_width + 2) * FLOAT_BYTES


def plan_work(num_rows: int, heads: int, widths: tuple[int, ...], tuning: Tuning) -> WorkPlan:
    """Deal the blocks of `num_rows` rows, whose selections have these widths, evenly."""
    blocks = tuple(math.ceil(width / tuning.block) for width in widths)
    row, total = sum(blocks), num_rows * sum(blocks)
    groups = math.ceil(heads / heads_of_program(heads))
    per_program = math.ceil(total / max(1, tuning.programs // groups))
    programs = math.ceil(total / per_program)
    cuts = programs > 1 and per_program % row != 0
    return WorkPlan(blocks, per_program, programs, programs + num_rows if cuts else 0)
