"""``sparse-kvcm plan``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer

from sparse_kvcm._core import InvalidArgument
from sparse_kvcm.byte_counts import parse_bytes
from sparse_kvcm.models import IndexDtype, KvDtype, load_geometry, presets
from sparse_kvcm.planner import LOCALITIES, Budgets, Plan, find_locality, make_plan
from sparse_kvcm.sizing.host_memory import host_memory
from sparse_kvcm.sizing.workload import MAX_BUDGET, Workload

_KV = ", ".join(get_args(KvDtype))
_INDEX = ", ".join(get_args(IndexDtype))


def plan(
    model: Annotated[
        str, typer.Option(help=f"One of {', '.join(presets())}, or the path of a config.json.")
    ],
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 32768,
    output: Annotated[int, typer.Option(help="Tokens that are generated.")] = 160,
    device_budget: Annotated[
        str | None, typer.Option(help="Device bytes of a rank for the KV cache, such as 45.6GB.")
    ] = None,
    gpu_memory: Annotated[
        str | None, typer.Option(help="Instead: memory of the GPU, of which --weights are taken.")
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="Weights and activations of a rank. [default: 0]")
    ] = None,
    gpu_fraction: Annotated[
        float | None, typer.Option(help="Part of the rest that may be used. [default: 0.9]")
    ] = None,
    host_memory_size: Annotated[
        str | None,
        typer.Option(
            "--host-memory",
            help="Bytes of the machine for history, all ranks together; auto: what this machine "
            "may pin of itself. Without it: as much as is needed.",
        ),
    ] = None,
    local_ranks: Annotated[int, typer.Option(help="Ranks that share the machine.")] = 1,
    gpu_cache_factor: Annotated[
        str, typer.Option(help="Cached slots of a request in selections, or auto.")
    ] = "2",
    kv_dtype: Annotated[str, typer.Option(help=f"One of {_KV}.")] = "bf16",
    index_dtype: Annotated[str, typer.Option(help=f"One of {_INDEX}.")] = "fp8",
    tokens_per_block: Annotated[
        int, typer.Option(help="Page in tokens; 0: the model's usual one.")
    ] = 0,
    max_batch_size: Annotated[int | None, typer.Option(help="Most requests at a time.")] = None,
    num_batches: Annotated[
        int, typer.Option(help="Copies of the batch buffers: 2 with an overlap scheduler.")
    ] = 1,
    max_util: Annotated[float, typer.Option(help="Most of a pool that requests may take.")] = 0.97,
    link: Annotated[float, typer.Option(help="Host to device, GB/s.")] = 50.0,
    step_ms: Annotated[float, typer.Option(help="A decode step without the fetch, ms.")] = 25.0,
    locality: Annotated[
        str | None, typer.Option(help=f"Miss curve: one of {', '.join(LOCALITIES)}.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw batch and speed over gpu_cache_factor.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
) -> None:
    """Say how many requests a decode worker holds, resident and offloaded, and why not more."""
    if kv_dtype not in get_args(KvDtype):
        raise InvalidArgument(f"[plan] --kv-dtype must be one of {_KV}, got {kv_dtype!r}")
    if prompt < 1 or output < 0:
        raise InvalidArgument(
            f"[plan] --prompt must be >= 1 and --output >= 0, got {prompt} and {output}"
        )
    auto = gpu_cache_factor == "auto"
    workload = Workload(
        load_geometry(model),
        prompt + output,
        cast(KvDtype, kv_dtype),
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
        max_batch_size,
    )
    curve = find_locality(locality, workload.geometry.name)
    result = make_plan(workload, budgets, curve, auto_factor=auto)
    if plot is not None:
        _plot(result, plot)
    if as_json:
        typer.echo(json.dumps(result.to_json(), indent=2))
    else:
        _show(result)


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
        if not 1 <= size <= MAX_BUDGET:
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
    if not 1 <= size <= MAX_BUDGET:
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
    return parse_bytes(size, "--host-memory") // local_ranks


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
