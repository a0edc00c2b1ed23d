"""A plan as tables."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from sparse_kvcm.byte_counts import show_bytes
from sparse_kvcm.planner import Plan


def plan_tables(plan: Plan) -> Iterator[Table | str]:
    """The lines and tables of ``sparse-kvcm plan``."""
    workload, budgets = plan.workload, plan.budgets
    yield from (f"[bold]Warning:[/bold] {warning}" for warning in plan.warnings)
    resident, offload = plan.resident, plan.offload
    yield (
        f"[bold]{workload.geometry.name}[/bold]: requests of {workload.usual_seq_len:,} tokens, "
        f"{workload.kv_dtype} units, {workload.index_dtype} index keys, "
        f"{show_bytes(budgets.device_bytes)} of device memory"
    )
    table = Table("", "resident", "offloaded", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_row("requests", f"{resident.max_batch:,}", f"[bold]{offload.max_batch:,}[/bold]")
    for part in dict.fromkeys([*resident.bytes_per_request, *offload.bytes_per_request]):
        sides = (resident.bytes_per_request.get(part), offload.bytes_per_request.get(part))
        table.add_row(f"  {part}", *("" if size is None else show_bytes(size) for size in sides))
    sums = (sum(side.bytes_per_request.values()) for side in (resident, offload))
    table.add_row("device bytes a request", *map(show_bytes, sums))
    table.add_row("host bytes a request", "", show_bytes(offload.host_bytes_per_request))
    table.add_row("binding limit", resident.binding_limit, offload.binding_limit)
    steps = (resident.step_ms, offload.step_ms)
    table.add_row("predicted step", *(f"{sum(step.values()):.1f} ms" for step in steps))
    for part in dict.fromkeys([*resident.step_ms, *offload.step_ms]):
        times = (step.get(part) for step in steps)
        table.add_row(f"  {part}", *("" if ms is None else f"{ms:.1f} ms" for ms in times))
    speeds = (resident.tokens_per_s, offload.tokens_per_s)
    table.add_row("predicted tokens/s", *(f"{speed:,.0f}" for speed in speeds))
    yield table
    if offload.max_batch == 0:
        yield f"No offloaded request fits. To fit one: {offload.advice}."
        return
    host = offload.max_batch * offload.host_bytes_per_request
    yield (
        f"Offloaded, gpu_cache_factor {offload.gpu_cache_factor:g}: a lease of "
        f"{offload.row_bytes / 2**20:.1f} MiB, {show_bytes(host)} of host history a rank. "
        f"{offload.misses_per_step:.0f} misses a selection ({plan.locality.name}), "
        f"{show_bytes(offload.fetch_bytes_per_step)} a step, "
        f"over a link of {budgets.link_gb_s:g} GB/s."
    )
    yield (
        f"For this link gpu_cache_factor {plan.recommended_gpu_cache_factor:g} is best. "
        f"For more requests: {offload.advice}."
    )
