"""Named lists of runs: what the committed figures and pictures are made of.

    scripts/bench_slice --sweep glm,v4 --json FILE [--plot FOLDER]

Each line is a command of its own; runs of one model share its weights. Every point is written as
it is done, so what is cut off is lost alone. Seconds are what an H200 should need.
"""

from __future__ import annotations

_GLM = "--model glm-5.2"
_LONG = "--model glm-5.2 --prompt 131072"
_V4 = "--model v4-flash --factor 4"
_V32 = "--model v32"

SWEEPS: dict[str, tuple[str, ...]] = {
    # Both curves of GLM-5.2 at 32K; 75 s.
    "glm": (
        f"{_GLM} --modes resident --batches 1,8,16,22,max",
        f"{_GLM} --modes offloaded --batches 1,8,28,64,110,max --overlap none,followers",
    ),
    # Those at 128K; 50 s.
    "long": (
        f"{_LONG} --modes resident --batches 1,4,max",
        f"{_LONG} --modes offloaded --batches 1,7,28,max --overlap none,followers",
    ),
    # V4 Flash, whose groups have no followers; 90 s.
    "v4": (
        f"{_V4} --modes resident --batches 64,256,max",
        f"{_V4} --modes offloaded --batches 64,256,589,max",
        f"{_V4} --modes offloaded --batches 256,max --overlap side",
    ),
    # DeepSeek-V3.2, groups of one layer as well; 70 s.
    "v32": (
        f"{_V32} --modes resident --batches 1,8,max",
        f"{_V32} --modes offloaded --batches 1,16,64,max",
        f"{_V32} --modes offloaded --batches 64,max --overlap side",
    ),
    # Where both sides should be alike: requests as long as a lease, and one request; 60 s. In
    # turns, since a GPU's clock wanders by more than they differ.
    "lease": (
        f"{_GLM} --fit-lease --batches 1,8,32 --turns 5",
        f"{_GLM} --batches 1 --turns 5",
    ),
    # What else could hide a fetch, checked first; 60 s.
    "overlap": (f"{_GLM} --modes offloaded --batches 64,max --overlap side,hits,halves --check",),
    # All of it on a CPU.
    "tiny": (
        "--model tiny --modes resident --batches 1 --output 40 --warm-up 2 --steps 4",
        "--model tiny --modes offloaded --batches 1,2 --output 40 --warm-up 2 --steps 4",
        "--model tiny-v4 --batches 1 --output 40 --warm-up 2 --steps 4",
    ),
}
ALL = ("glm", "v4", "long", "v32", "overlap", "lease")


def lines_of(names: str) -> list[str]:
    """Command lines of comma-separated names; ``all`` is `ALL`.

    Raises
    ------
    ValueError
        For a name that is not known.
    """
    chosen = ALL if names == "all" else names.split(",")
    for name in chosen:
        if name not in SWEEPS:
            raise ValueError(f"--sweep must be all or of {', '.join(SWEEPS)}, got {name!r}")
    return [line for name in chosen for line in SWEEPS[name]]
