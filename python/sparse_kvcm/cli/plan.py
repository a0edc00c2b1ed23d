"""``sparse-kvcm plan``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast, get_args

import typer

from sparse_kvcm._core import MAX_TIER_BYTES, InvalidArgument
from sparse_kvcm.byte_counts import parse_bytes
from sparse_kvcm.cli import options
from sparse_kvcm.models import IndexDtype, KvDtype, load_geometry
from sparse_kvcm.planner import Budgets, Plan, find_locality, make_plan
from sparse_kvcm.sizing.host_memory import host_memory
from sparse_kvcm.sizing.workload import Workload

NOTHING_FITS = 1  # exit status


def plan(
    model: options.Model,
    prompt: options.Prompt = 32768,
    output: options.Output = 160,
    device_budget: options.DeviceBudget = None,
    gpu_memory: options.GpuMemory = None,
    weights: options.Weights = None,
    gpu_fraction: options.GpuFraction = None,
    host_memory_size: options.HostMemorySize = None,
    local_ranks: options.LocalRanks = 1,
    gpu_cache_factor: options.GpuCacheFactor = "2",
    kv_dtype: options.KvDtypeName = "bf16",
    index_dtype: options.IndexDtypeName = "fp8",
    tokens_per_block: options.TokensPerBlock = 0,
    max_batch_size: options.MaxBatchSize = None,
    num_batches: options.NumBatches = 1,
    max_util: options.MaxUtil = 0.97,
    link: options.Link = 55.0,
    step_ms: options.StepMs = None,
    expert_ranks: options.ExpertRanks = 8,
    locality: options.LocalityName = None,
    plot: options.Plot = None,
    as_json: options.AsJson = False,
) -> None:
    """Say how many requests a decode worker holds, resident and offloaded, and why not more.

    Exit status: 0 if an offloaded request fits, 1 if none does, 2 for an argument that is wrong.
    """
    if prompt < 1 or output < 0:
        raise InvalidArgument(
            f"[plan] --prompt must be >= 1 and --output >= 0, got {prompt} and {output}"
        )
    auto = gpu_cache_factor == "auto"
    workload = Workload(
        load_geometry(model),
        prompt + output,
        _kv_dtype(kv_dtype),
        cast(IndexDtype, index_dtype),
        tokens_per_block=tokens_per_block,
        gpu_cache_factor=2.0 if auto else _to_float("--gpu-cache-factor", gpu_cache_factor),
        max_util_for_resume=max_util,
        num_batches=num_batches,
    )
    budgets = Budgets(
        _device_bytes(device_budget, gpu_memory, weights, gpu_fraction),
        _host_bytes(host_memory_size, local_ranks),
        link,
        step_ms,
        expert_ranks,
        max_batch_size,
    )
    curve = find_locality(locality, workload.geometry.name)
    _report(make_plan(workload, budgets, curve, auto_factor=auto), plot, as_json=as_json)


def _report(result: Plan, plot: Path | None, *, as_json: bool) -> None:
    if plot is not None:
        _plot(result, plot)
    if as_json:
        typer.echo(json.dumps(result.to_json(), indent=2))
    else:
        _show(result)
    if result.offload.max_batch == 0:
        raise typer.Exit(NOTHING_FITS)


def _kv_dtype(name: str) -> KvDtype:
    if name not in get_args(KvDtype):
        raise InvalidArgument(
            f"[plan] --kv-dtype must be one of {', '.join(get_args(KvDtype))}, got {name!r}"
        )
    return cast(KvDtype, name)


def _to_float(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise InvalidArgument(f"[plan] {option} must be a number or auto, got {text!r}") from error


def _device_bytes(
    budget: str | None, memory: str | None, weights: str | None, fraction: float | None
) -> int:
    if budget is not None and memory is None and weights is None and fraction is None:
        size = parse_bytes(budget, "--device-budget")
        if not 1 <= size <= MAX_TIER_BYTES:
            raise InvalidArgument(f"[plan] --device-budget must be in [1, 2^60] B, got {size}")
        return size
    if memory is None or budget is not None:
        raise InvalidArgument(
            "[plan] one of --device-budget and --gpu-memory must be given; --weights and "
            "--gpu-fraction go with --gpu-memory"
        )
    fraction = 0.9 if fraction is None else fraction
    if not 0 < fraction <= 1:
        raise InvalidArgument(f"[plan] --gpu-fraction must be in (0, 1], got {fraction}")
    total = parse_bytes(memory, "--gpu-memory")
    used = parse_bytes(weights or "0", "--weights")
    size = int((total - used) * fraction)
    if not 1 <= size <= MAX_TIER_BYTES:
        raise InvalidArgument(
            f"[plan] --gpu-memory less --weights must be in [1, 2^60] B, got {total} less {used}"
        )
    return size


def _host_bytes(size: str | None, local_ranks: int) -> int | None:
    if local_ranks < 1:
        raise InvalidArgument(f"[plan] --local-ranks must be >= 1, got {local_ranks}")
    if size is None:
        return None
    if size == "auto":
        return host_memory(local_ranks).automatic
    each = parse_bytes(size, "--host-memory") // local_ranks
    if each > MAX_TIER_BYTES:
        raise InvalidArgument(f"[plan] --host-memory must be <= 2^60 B a rank, got {each}")
    return each


def _plot(result: Plan, path: Path) -> None:
    from sparse_kvcm.planner.plot import plot_plan

    try:
        plot_plan(result, path)
    except InvalidArgument:
        raise
    except (OSError, ValueError) as error:  # of the folder, of the format
        raise InvalidArgument(
            f"[plan] --plot must be a file that can be written, such as out.png, got "
            f"{str(path)!r}: {error}"
        ) from error


def _show(result: Plan) -> None:
    from rich.console import Console

    from sparse_kvcm.cli.table import plan_tables

    console = Console(highlight=False)
    for part in plan_tables(result):
        console.print(cast(Any, part))
