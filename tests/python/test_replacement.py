"""The replacement study on small traces: what each policy must do whatever the trace."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

from benchmarks import replacement
from benchmarks.replacement import POLICIES, Cache, Trace, make_trace, misses_of_ours

UNITS = 1024


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"K": 64, "WARM_UP": 20, "COUNTED": 40, "AHEAD": 30}.items():
        monkeypatch.setattr(replacement, name, value)


def share(policy: str, trace: Trace, slots: int = 128) -> float:
    return Cache(UNITS + len(trace.selections) + 1, slots, 0).misses(policy, trace)


@pytest.mark.parametrize("preset", ["glm51", "v32_mid"])
def test_nothing_misses_less_than_the_optimum(preset: str) -> None:
    trace = make_trace(preset, UNITS, 1)
    shares = {policy: share(policy, trace) for policy in POLICIES}
    assert min(shares, key=lambda policy: shares[policy]) == "optimum"
    assert all(0 < one < 1 for one in shares.values())
    # Ours does not fetch the newest unit, 1 of 64.
    ours = misses_of_ours(trace.selections, UNITS, 128) + 1 / 64
    assert ours == pytest.approx(shares["lru"], abs=0.01)


def test_a_cache_of_all_units_misses_what_is_new() -> None:
    trace = make_trace("glm51", UNITS, 2)
    everything = UNITS + len(trace.selections) + 1
    assert len({share(policy, trace, everything) for policy in POLICIES}) == 1


def test_units_that_are_near_are_kept() -> None:
    """Two sets in turn, and a third that would push the first out of an LRU cache."""
    sets = [np.arange(i * 64, i * 64 + 64) for i in range(3)]
    order = [0, 1, 2] * 30
    nothing = np.empty(0, np.int64)
    near = [nothing if i == 0 else sets[0] for i in order]
    scores = [np.zeros(UNITS + 91, np.float32)] * 90
    trace = Trace([sets[i] for i in order], near, scores)
    assert share("lru", trace) == 1
    assert share("near", trace) == pytest.approx(2 / 3, abs=0.02)


@pytest.mark.parametrize(
    "arguments", [["--states", "0"], ["--units", "100"], ["--units", "-5"], ["--json", "."]]
)
def test_a_wrong_option_is_refused_before_anything_runs(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["replacement", *arguments])
    with pytest.raises(SystemExit):
        replacement.main()
    assert f"{arguments[0]} must be" in capsys.readouterr().err
