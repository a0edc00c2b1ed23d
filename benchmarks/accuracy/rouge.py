"""ROUGE-L: the longest common subsequence of two texts' words (Lin, 2004).

Words are runs of lower-case ASCII letters and digits, not stemmed, as in the package `rouge-score`.
That package brings nltk, which one subsequence does not need.
"""

from __future__ import annotations

import re
from collections.abc import Sequence


def words(text: str) -> list[str]:
    """The words of a text."""
    return re.findall(r"[a-z0-9]+", text.lower())


def common_length(first: Sequence[str], second: Sequence[str]) -> int:
    """Length of the longest common subsequence.

    A row of the usual table is one integer, a bit per word of `first`, 0 where the row grows; so a
    row takes four operations (Hyyro, 2004).
    """
    places: dict[str, int] = {}
    for i, word in enumerate(first):
        places[word] = places.get(word, 0) | 1 << i
    every = (1 << len(first)) - 1
    row = every
    for word in second:
        matches = row & places.get(word, 0)
        row = (row + matches | row - matches) & every
    return len(first) - row.bit_count()


def rouge_l(candidate: str, reference: str) -> float:
    """F1 of the common subsequence's share of both texts, in [0, 1]; 0 if one has no words."""
    a, b = words(candidate), words(reference)
    common = common_length(a, b)
    return 2 * common / (len(a) + len(b)) if common else 0.0
