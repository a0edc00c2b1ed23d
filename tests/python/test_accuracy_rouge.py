"""ROUGE-L against values counted by hand, and against the textbook's table."""

from __future__ import annotations

import importlib
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def rouge(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("benchmarks.accuracy.rouge")


def table_length(first: Sequence[str], second: Sequence[str]) -> int:
    row = [0] * (len(second) + 1)
    for a in first:
        before = row
        row = [0]
        for j, b in enumerate(second):
            row.append(before[j] + 1 if a == b else max(before[j + 1], row[j]))
    return row[-1]


@pytest.mark.parametrize(
    ("candidate", "reference", "expected"),
    [
        ("the cat sat on the mat", "the cat sat on the mat", 1.0),
        ("the cat lay on the mat", "the cat sat on the mat", 10 / 12),  # 5 of 6 and of 6
        ("police killed the gunman", "police kill the gunman", 6 / 8),  # Lin 2004: 3 of 4
        ("the gunman kill police", "police kill the gunman", 4 / 8),  # "the gunman"
        ("a b c d", "d c b a", 2 / 8),
        ("b", "a b c d e", 2 / 6),  # 1 of 1 and 1 of 5
        ("The CAT's mat, 2019!", "the cat s mat 2019", 1.0),  # case and signs are no words
        ("one two", "three four", 0.0),
        ("", "three four", 0.0),
        ("...", "", 0.0),
    ],
)
def test_rouge_l_is_what_is_counted_by_hand(
    rouge: Any, candidate: str, reference: str, expected: float
) -> None:
    assert rouge.rouge_l(candidate, reference) == pytest.approx(expected)


def test_common_length_equals_the_textbooks_table(rouge: Any) -> None:
    for seed in range(300):
        draw = random.Random(seed)
        alphabet = "abcdefgh"[: draw.randint(1, 8)]
        first, second = (draw.choices(alphabet, k=draw.randint(0, 70)) for _ in range(2))
        assert rouge.common_length(first, second) == table_length(first, second), f"seed {seed}"
