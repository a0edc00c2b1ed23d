"""The plan over gpu_cache_factor as a picture. Needs the extra ``plot``."""

from __future__ import annotations

from pathlib import Path

from sparse_kvcm._core import InvalidArgument, NotAvailable
from sparse_kvcm.planner.plan import Plan, sweep_factors


def plot_plan(plan: Plan, path: str | Path) -> None:
    """Draw batch and predicted tokens a second over gpu_cache_factor into a file.

    Raises
    ------
    NotAvailable
        Without matplotlib.
    """
    if not Path(path).suffix:
        raise InvalidArgument(f"[plot_plan] path must end in .png, .pdf or .svg, got {str(path)!r}")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NotAvailable(
            "[plot_plan] drawing needs matplotlib: pip install 'sparse_kvcm[plot]'"
        ) from error
    sides = sweep_factors(plan.workload, plan.budgets, plan.locality)
    factors = [side.gpu_cache_factor for side in sides]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    batch = figure.add_subplot()
    batch.plot(factors, [side.max_batch for side in sides], "o-", color="tab:blue")
    batch.axhline(plan.resident.max_batch, linestyle=":", color="tab:blue")
    batch.set_xlabel("gpu_cache_factor (cached slots / top-k)")
    batch.set_ylabel("requests (dotted: resident)", color="tab:blue")
    speed = batch.twinx()
    speed.plot(factors, [side.tokens_per_s for side in sides], "s-", color="tab:orange")
    speed.axhline(plan.resident.tokens_per_s, linestyle=":", color="tab:orange")
    speed.set_ylabel("predicted tokens/s (dotted: resident)", color="tab:orange")
    speed.axvline(plan.recommended_gpu_cache_factor, color="tab:gray", linewidth=0.8)
    for axes in (batch, speed):
        axes.set_ylim(bottom=0)
    batch.set_title(
        f"{plan.workload.geometry.name}, {plan.workload.usual_seq_len:,} tokens, "
        f"{plan.budgets.device_bytes / 1e9:g} GB, {plan.budgets.link_gb_s:g} GB/s"
    )
    figure.savefig(path)
