"""The options of ``sparse-kvcm plan``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, get_args

import typer

from sparse_kvcm.models import IndexDtype, KvDtype, presets
from sparse_kvcm.planner import LOCALITIES

Model = Annotated[
    str, typer.Option(help=f"One of {', '.join(presets())}, or the path of a config.json.")
]
Prompt = Annotated[int, typer.Option(help="Tokens of a prompt.")]
Output = Annotated[int, typer.Option(help="Tokens that are generated.")]
DeviceBudget = Annotated[
    str | None, typer.Option(help="Device bytes of a rank for the KV cache, such as 45.6GB.")
]
GpuMemory = Annotated[
    str | None, typer.Option(help="Instead: memory of the GPU, of which --weights are taken.")
]
Weights = Annotated[
    str | None, typer.Option(help="Weights and activations of a rank. [default: 0]")
]
GpuFraction = Annotated[
    float | None, typer.Option(help="Part of the rest that may be used. [default: 0.9]")
]
HostMemorySize = Annotated[
    str | None,
    typer.Option(
        "--host-memory",
        help="Bytes of the machine for history, all ranks together; auto: what this machine "
        "may pin of itself. Without it: as much as is needed.",
    ),
]
LocalRanks = Annotated[int, typer.Option(help="Ranks that share the machine.")]
GpuCacheFactor = Annotated[
    str, typer.Option(help="Cached slots of a request in selections, or auto.")
]
KvDtypeName = Annotated[str, typer.Option(help=f"One of {', '.join(get_args(KvDtype))}.")]
IndexDtypeName = Annotated[str, typer.Option(help=f"One of {', '.join(get_args(IndexDtype))}.")]
TokensPerBlock = Annotated[int, typer.Option(help="Page in tokens; 0: the model's usual one.")]
MaxBatchSize = Annotated[int | None, typer.Option(help="Most requests at a time.")]
NumBatches = Annotated[
    int, typer.Option(help="Copies of the batch buffers: 2 with an overlap scheduler.")
]
MaxUtil = Annotated[float, typer.Option(help="Most of a pool that requests may take.")]
Link = Annotated[float, typer.Option(help="What a copy from host to device reaches, GB/s.")]
StepMs = Annotated[
    float | None,
    typer.Option(
        help="A decode step without what offload adds, ms, as measured at this batch. Without it: "
        "by figures measured on an H200."
    ),
]
ExpertRanks = Annotated[
    int, typer.Option(help="Ranks that divide the experts, each with as many requests.")
]
LocalityName = Annotated[
    str | None, typer.Option(help=f"Miss curve: one of {', '.join(LOCALITIES)}.")
]
Plot = Annotated[Path | None, typer.Option(help="Also draw batch and speed over gpu_cache_factor.")]
AsJson = Annotated[bool, typer.Option("--json", help="Write JSON.")]
