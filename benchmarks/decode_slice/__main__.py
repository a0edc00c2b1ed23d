"""The command: see the package's description."""

from __future__ import annotations

import argparse
import datetime
import gc
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import benchmarks.decode_slice as package
from benchmarks.decode_slice import measure, plots, report
from benchmarks.decode_slice import options as checks
from benchmarks.decode_slice.budget import Budget, Mode
from benchmarks.decode_slice.cache import SliceCache
from benchmarks.decode_slice.forward import OVERLAPS, Overlap
from benchmarks.decode_slice.measure import Run
from benchmarks.decode_slice.model import SliceModel, make_slice
from benchmarks.decode_slice.sweeps import SWEEPS, lines_of
from benchmarks.decode_slice.weights import Weights
from benchmarks.traces import PRESETS
from sparse_kvcm import _core, cuda_is_available

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from run_bench import commit

SWEEP = (1, 4, 8, 16, 24, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
CHECKED_STEPS = 4
ROUNDED = ("halves", "hits")  # products of other shapes; parts that are rounded and merged
BOUND = 0.02  # of 1 + an output


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    overlaps = "; ".join(f"{name}: {text}" for name, text in OVERLAPS.items())
    parser = argparse.ArgumentParser(
        prog="scripts/bench_slice",
        description=package.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="glm-5.2", help="glm-5.2, v32, v4-flash, tiny, tiny-v4")
    parser.add_argument("--layers", type=int, help="whole selection groups (default: 8; V4: 12)")
    parser.add_argument("--prompt", type=int, default=32_768, help="tokens (default: 32,768)")
    parser.add_argument("--output", type=int, default=160, help="tokens (default: 160)")
    names = f"all, or of {', '.join(SWEEPS)}: instead of what follows, but for the last four"
    parser.add_argument("--sweep", help=names)
    parser.add_argument("--modes", default="resident,offloaded")
    parser.add_argument("--batches", help='such as 1,8,max (default: a sweep up to "max")')
    parser.add_argument("--factor", type=float, default=2.0, help="gpu_cache_factor (default: 2)")
    parser.add_argument("--overlap", default="none", help=overlaps)
    parser.add_argument("--trace", help=f"{', '.join(PRESETS)} (default: the model's)")
    parser.add_argument("--experts", choices=("fp8", "bf16"), default="fp8")
    parser.add_argument("--ranks", type=int, default=2, help="expert parallel (default: 2)")
    parser.add_argument("--warm-up", type=int, default=32, help="steps (default: 32)")
    parser.add_argument("--steps", type=int, default=48, help="timed steps (default: 48)")
    turns = "measure both modes in turns, so often; the middle one counts (default: 1)"
    parser.add_argument("--turns", type=int, default=1, help=turns)
    parser.add_argument("--fit-lease", action="store_true", help="requests as long as a lease")
    parser.add_argument(
        "--check",
        action="store_true",
        help="compare attention of both sides and of all overlaps first",
    )
    parser.add_argument("--device", help="default: cuda:0, for tiny models cpu")
    parser.add_argument("--json", type=Path, help="a file of records, kept and added to")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="draw all of --json there")
    parser.add_argument("--only-plot", action="store_true", help="measure nothing")
    options = parser.parse_args(arguments)
    options.command = " ".join(sys.argv[1:] if arguments is None else arguments)
    known = {"--modes": ("resident", "offloaded"), "--overlap": tuple(OVERLAPS)}
    for flag, names in known.items():
        for one in getattr(options, flag[2:]).split(","):
            if one not in names:
                parser.error(f"{flag} must be of {', '.join(names)}, got {one!r}")
    try:
        check_options(options)
    except ValueError as error:
        parser.error(str(error))
    return options


def check_options(options: argparse.Namespace) -> None:
    """Refuse, by ValueError, what could not be measured or written."""
    if (options.plot or options.only_plot) and not options.json:
        raise ValueError(f"{'--plot' if options.plot else '--only-plot'} needs --json")
    if options.json:
        checks.check_place("--json", options.json)
        if options.json.exists() or options.only_plot:
            report.read(options.json)
    if options.plot:
        checks.check_plot(options.plot)
    if options.device is not None:
        checks.check_device(options.device)
    if options.sweep is not None:
        lines_of(options.sweep)
    elif not options.only_plot:
        model = make_slice(options.model, options.layers)
        if options.batches is not None:
            checks.check_batches(options.batches)
        checks.check_factor(model, options.factor)
        checks.check_ranks(model, options.ranks)
        for name, value in (("--steps", options.steps), ("--turns", options.turns)):
            checks.check_least(name, value, 1)
        if options.trace not in (None, *PRESETS):
            names = ", ".join(PRESETS)
            raise ValueError(f"--trace must be of {names}, got {options.trace!r}")
        prompt, least = make_run(model, options).prompt, model.geometry.tokens_per_unit
        checks.check_least("tokens of a prompt", prompt, least)


def make_run(model: SliceModel, options: argparse.Namespace) -> Run:
    """The measurement that options ask for; raises ValueError for too few output tokens."""
    prompt = options.prompt
    if model.name.startswith("tiny"):
        prompt = min(prompt, 300 * model.geometry.tokens_per_unit)
    if options.fit_lease:
        units = int(options.factor * model.geometry.top_k) // model.units_per_page + 1
        prompt = units * model.units_per_page * model.geometry.tokens_per_unit - options.output
    run = Run(prompt, options.warm_up, options.steps, options.trace or model.trace)
    if run.total_steps > options.output or run.warm_up < measure.EAGER_STEPS:
        raise ValueError(
            f"--warm-up (at least {measure.EAGER_STEPS}) + --steps + {measure.PHASE_STEPS} must be "
            f"at most --output {options.output}, got {run.total_steps}"
        )
    return run


def batches_of(options: argparse.Namespace, most: int) -> list[int]:
    """Batches of one side, ascending, none above what its budget holds."""
    if options.batches is None:
        return [*(one for one in SWEEP if one < 0.95 * most), most]
    wanted = {most if one == "max" else int(one) for one in options.batches.split(",")}
    return sorted(one for one in wanted if 1 <= one <= most)


def capacity(model: SliceModel, mode: Mode, run: Run, options: argparse.Namespace) -> int:
    """Requests that the budget holds, and under offload 80 % of the free host memory."""
    seq_len = run.prompt + options.output
    most = Budget(model, seq_len, options.factor, options.device).largest_batch(mode)
    free = _core.read_host_limits().available
    if mode == "offloaded" and free is not None:
        unit = sum(len(group) for group in model.geometry.groups)
        unit *= model.geometry.unit_layout("fp8").unit_bytes
        per_request = -(-seq_len // model.geometry.tokens_per_unit) * unit
        most = min(most, int(0.8 * free) // per_request)
    return most


def check(model: SliceModel, weights: Weights, run: Run, options: argparse.Namespace) -> None:
    """Compare attention outputs of both sides, and of overlaps; raises RuntimeError if they differ.

    Bit by bit, but for overlaps of `ROUNDED`: there within `BOUND`, and in the first layer, since
    roundings to FP8 behind it make more of a last bit.
    """
    n = min(4, *(capacity(model, mode, run, options) for mode in ("resident", "offloaded")))
    seq_len = run.prompt + options.output

    def outputs(mode: Mode, overlaps: list[Overlap]) -> list[list[list[torch.Tensor]]]:
        cache = SliceCache(model, mode, n, seq_len, options.factor, options.device)
        return [
            measure.attention_outputs(cache, weights, n, replace(run, overlap=one), CHECKED_STEPS)
            for one in overlaps
        ]

    (expected,) = outputs("resident", ["none"])
    overlaps = list(dict.fromkeys(["none", *options.overlap.split(",")]))
    for overlap, found in zip(overlaps, outputs("offloaded", overlaps), strict=True):
        layers = 1 if overlap in ROUNDED else model.layers
        largest = 0.0
        for step, (ones, others) in enumerate(zip(expected, found, strict=True)):
            for layer in range(layers):
                one, other = ones[layer][:n].float(), others[layer][:n].float()
                by = float(((one - other).abs() / (1 + one.abs())).max())
                if not by <= (BOUND if overlap in ROUNDED else 0):  # NaN, too
                    where = f"{overlap}, step {step}, layer {layer}"
                    raise RuntimeError(f"[check] {where}: outputs differ by {by}")
                largest = max(largest, by)
        how = f"within {largest:.2g}" if overlap in ROUNDED else "bit by bit"
        print(f"{overlap}: attention of {CHECKED_STEPS} steps, {layers} layers, {n} rows is the "
              f"resident one {how}", flush=True)  # fmt: skip


def about(model: SliceModel, cache: SliceCache, options: argparse.Namespace) -> dict[str, Any]:
    """What all records of a cache say of it."""
    gpu = torch.cuda.get_device_name() if options.device != "cpu" else "cpu"
    return {
        "model": model.name,
        "layers": model.layers,
        "whole_layers": model.whole_layers,
        "mode": cache.mode,
        "factor": options.factor,
        "experts": f"{options.experts}, {model.local_experts} of {model.experts}",
        "budget": model.budget,
        "top_k": model.geometry.top_k,
        "units": cache.sizes.max_units,
        "lease_slots": cache.sizes.lease_slots,
        "row_bytes": model.layers_of_units * cache.unit_bytes,
        "device": gpu,
        "torch": torch.__version__,
        "command": f"scripts/bench_slice {options.command}",
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    }


@dataclass(frozen=True)
class Point:
    """One record of a sweep."""

    cache: SliceCache
    overlap: Overlap
    batch: int


def points_of(model: SliceModel, mode: Mode, run: Run, options: argparse.Namespace) -> list[Point]:
    """What is measured of one side, over one cache."""
    batches = batches_of(options, most := capacity(model, mode, run, options))
    print(f"{mode}: the budget holds {most} requests; batches {batches}", flush=True)
    if not batches:
        return []
    begin, seq_len = time.perf_counter(), run.prompt + options.output
    cache = SliceCache(model, mode, max(batches), seq_len, options.factor, options.device)
    print(f"{mode}: memory in {time.perf_counter() - begin:.1f} s", flush=True)
    overlaps = options.overlap.split(",") if mode == "offloaded" else ["none"]
    return [Point(cache, overlap, batch) for overlap in overlaps for batch in batches]


def sweep(
    model: SliceModel,
    weights: Weights,
    run: Run,
    options: argparse.Namespace,
    link: float | None,
) -> None:
    """Measure all points, each written down as it is done; in turns, those of one batch."""
    modes = options.modes.split(",")
    for together in [modes] if options.turns > 1 else [[mode] for mode in modes]:
        points = [one for mode in together for one in points_of(model, mode, run, options)]
        alike = [[one] for one in points]
        if options.turns > 1:
            batches = sorted({one.batch for one in points})
            alike = [[one for one in points if one.batch == batch] for batch in batches]
        for group in alike:
            turns = [
                [measured(model, weights, run, options, link, one) for one in group]
                for _ in range(options.turns)
            ]
            records = [report.middle(of_point) for of_point in zip(*turns, strict=True)]
            if options.json:
                report.merge(options.json, records)
            report.show(records)


def measured(
    model: SliceModel,
    weights: Weights,
    run: Run,
    options: argparse.Namespace,
    link: float | None,
    point: Point,
) -> dict[str, Any]:
    """The record of a point."""
    begin = time.perf_counter()
    record = about(model, point.cache, options)
    record |= {"prompt": run.prompt, "overlap": point.overlap, "trace": run.trace}
    one = replace(run, overlap=point.overlap)
    record |= {"link_gb_s": link} | measure.run_point(point.cache, weights, point.batch, one)
    if link and point.overlap == "none" and "fetch_gb_s" in record:
        record["link_share"] = record["fetch_gb_s"] / link
    spent = ", ".join(f"{what} {took:.1f}" for what, took in record["seconds"].items())
    print(f"{point.cache.mode} {point.overlap}, {point.batch} requests: "
          f"{time.perf_counter() - begin:.1f} s: {spent}", flush=True)  # fmt: skip
    if options.device != "cpu":
        torch.cuda.empty_cache()
    return record


class Session:
    """Runs one after the other; those of one model share its weights."""

    def __init__(self) -> None:
        self._of: tuple[SliceModel, str, str] | None = None
        self._weights: Weights | None = None
        self._stream: torch.cuda.Stream | None = None
        self._link: float | None = None

    def run(self, options: argparse.Namespace) -> None:
        """Check and measure."""
        model = replace(make_slice(options.model, options.layers), ranks=options.ranks)
        if options.device is None:
            options.device = "cpu" if model.name.startswith("tiny") else "cuda:0"
        if options.device != "cpu" and not (cuda_is_available() and torch.cuda.is_available()):
            raise SystemExit("scripts/bench_slice: no GPU; --model tiny runs on a CPU")
        run = make_run(model, options)
        if options.device != "cpu" and self._stream is None:
            self._stream = torch.cuda.Stream(options.device)
            self._link = measure.link_gb_s(options.device)
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            weights = self._weights_of(model, options)
            if options.check:
                check(model, weights, run, options)
            sweep(model, weights, run, options, self._link)

    def _weights_of(self, model: SliceModel, options: argparse.Namespace) -> Weights:
        wanted = (model, options.device, options.experts)
        if self._weights is None or self._of != wanted:
            self._weights = None  # the others' memory first
            if options.device != "cpu":
                gc.collect()
                torch.cuda.empty_cache()
            begin = time.perf_counter()
            self._weights, self._of = Weights(model, options.device, options.experts), wanted
            if options.device != "cpu":
                torch.cuda.synchronize()
            print(f"{model.name}: weights in {time.perf_counter() - begin:.1f} s", flush=True)
        return self._weights


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = parse(arguments)
    session, begin = Session(), time.perf_counter()
    lines = lines_of(options.sweep) if options.sweep and not options.only_plot else []
    if not options.only_plot and not lines:
        session.run(options)
    for line in lines:
        one = parse(line.split())
        one.json, one.device = options.json, options.device
        print(f"\n=== {time.perf_counter() - begin:.0f} s: {one.command}", flush=True)
        session.run(one)
    if options.json and options.json.exists():
        runs = report.merge(options.json, [])  # plans again, where planning is there
        report.show(runs)
        if options.plot:
            for path in plots.plot(runs, options.plot):
                print(path)


if __name__ == "__main__":
    main()
