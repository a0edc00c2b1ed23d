"""Figures of two runs side by side, the table, and what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from benchmarks.accuracy.decode import Run
from benchmarks.accuracy.rouge import rouge_l


@dataclass(frozen=True)
class Figures:
    """How a resident and an offloaded run compare.

    Attributes
    ----------
    rouge_l : dict of str to float
        Means over requests, in [0, 1]: of both runs against the references, and of the offloaded
        one against the resident one.
    identical, total : int
        Tokens at one place of an answer that are equal, of so many places.
    first_difference : list of int or None
        Of each request, the place of the first token that differs.
    """

    rouge_l: dict[str, float]
    identical: int
    total: int
    first_difference: list[int | None]

    @property
    def agreement(self) -> float:
        """The fraction of identical tokens."""
        return self.identical / self.total


def compare(
    resident: Run,
    offloaded: Run,
    references: Sequence[str],
    text: Callable[[Sequence[int]], str],
) -> Figures:
    """Compare the answers of two runs; `text` makes them of tokens."""
    pairs = list(zip(resident.tokens, offloaded.tokens, strict=True))
    texts = [(text(a), text(b)) for a, b in pairs]
    triples = [(*two, one) for two, one in zip(texts, references, strict=True)]
    firsts = []
    for a, b in pairs:
        same = len(list(takewhile(lambda two: two[0] == two[1], zip(a, b, strict=False))))
        firsts.append(None if a == b else same)
    return Figures(
        rouge_l={
            "resident": _mean([rouge_l(a, reference) for a, _, reference in triples]),
            "offloaded": _mean([rouge_l(b, reference) for _, b, reference in triples]),
            "offloaded_against_resident": _mean([rouge_l(b, a) for a, b, _ in triples]),
        },
        identical=sum(x == y for a, b in pairs for x, y in zip(a, b, strict=False)),
        total=sum(max(len(a), len(b)) for a, b in pairs),
        first_difference=firsts,
    )


def faults_of(figures: Figures, min_agreement: float) -> list[str]:
    """Say what the figures fail by."""
    if figures.agreement >= min_agreement:
        return []
    different = [(i, at) for i, at in enumerate(figures.first_difference) if at is not None]
    request, place = different[0]
    return [
        f"tokens differ: {figures.agreement:.2%} are identical, --min-agreement is "
        f"{min_agreement:.2%}; {len(different)} of {len(figures.first_difference)} requests "
        f"differ, request {request} from token {place} on"
    ]


def show(console: Console, resident: Run, offloaded: Run, figures: Figures) -> None:
    """Print the table, and how the offloaded run went."""
    table = Table(title="ROUGE-L, mean F1 in %", box=SIMPLE)
    for name in ("run", "against", "ROUGE-L", "tokens"):
        table.add_column(name, justify="left" if name in ("run", "against") else "right")
    rows = (
        ("resident", "references", "resident", resident),
        ("offloaded", "references", "offloaded", offloaded),
        ("offloaded", "resident", "offloaded_against_resident", offloaded),
    )
    for run, against, key, of in rows:
        tokens = sum(map(len, of.tokens))
        table.add_row(run, against, f"{100 * figures.rouge_l[key]:.2f}", f"{tokens:,}")
    console.print(table)
    found = offloaded.hits + offloaded.misses
    console.print(
        f"{offloaded.steps} steps of {offloaded.fewest_rows} requests or more; histories of "
        f"{offloaded.shortest_history} units or more, leases of {offloaded.lease}; "
        f"{offloaded.misses:,} of {found:,} selected units fetched"
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
