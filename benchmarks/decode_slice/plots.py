"""Two pictures of a record file: speed and step time over requests, and what a step consists of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.decode_slice.clock import PHASES

Record = dict[str, Any]


def _label(record: Record) -> str:
    if record["mode"] == "resident":
        return "resident"
    overlap = "" if record["overlap"] == "none" else f", {record['overlap']}"
    trace = "" if record["trace"] in ("glm51", "v32_mid") else f", {record['trace']}"
    return f"offloaded, m = {record['factor']:g}{overlap}{trace}"


def plot(records: list[Record], folder: Path) -> list[Path]:
    """Draw both for each model and prompt into PNGs; return their paths."""
    from matplotlib.figure import Figure

    made = []
    folder.mkdir(parents=True, exist_ok=True)
    for model, prompt in sorted({(one["model"], one["prompt"]) for one in records}):
        some = [one for one in records if (one["model"], one["prompt"]) == (model, prompt)]
        for name, draw in (("throughput", _draw_throughput), ("step", _draw_step)):
            figure = Figure(figsize=(10, 4.2), layout="constrained")
            draw(figure, some)
            figure.suptitle(f"{model}, {some[0]['layers']} layers, {prompt:,} tokens")
            made.append(folder / f"decode_slice_{model}_{prompt}_{name}.png")
            figure.savefig(made[-1], dpi=130)
    return made


def _draw_throughput(figure: Any, records: list[Record]) -> None:
    speed, time = figure.subplots(1, 2)
    for label in dict.fromkeys(map(_label, records)):
        some = sorted((r for r in records if _label(r) == label), key=lambda r: int(r["batch"]))
        for axes, name in ((speed, "tokens_per_s"), (time, "step_ms")):
            batches = [r["batch"] for r in some]
            (line,) = axes.plot(batches, [r[name] for r in some], "o-", label=label)
            planned = [(r["batch"], r["predicted"][name]) for r in some if "predicted" in r]
            if planned:
                axes.plot(*zip(*planned, strict=True), "x", color=line.get_color())
    for axes, name in ((speed, "tokens/s of the slice"), (time, "median step, ms")):
        axes.set_xlabel("requests")
        axes.set_ylabel(name)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    speed.legend(fontsize=8, title="x: planned")


def _draw_step(figure: Any, records: list[Record]) -> None:
    axes = figure.subplots()
    bars = [one for one in records if one["overlap"] in ("none", "followers")]
    bars.sort(key=lambda one: (_label(one) != "resident", _label(one), one["batch"]))
    names = [
        "\n".join([str(one["batch"]), *_label(one).removeprefix("offloaded, ").split(", ")])
        for one in bars
    ]
    bottom = [0.0] * len(bars)
    for phase in PHASES:
        heights = [one["phases_ms"].get(phase, 0.0) for one in bars]
        axes.bar(range(len(bars)), heights, bottom=bottom, label=phase)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    axes.set_xticks(range(len(bars)), names, fontsize=6)
    axes.set_ylabel("ms of a step")
    axes.legend(fontsize=8, ncols=4)
