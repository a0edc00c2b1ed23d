"""``sparse-kvcm doctor``: what this machine would pin, and what to fix."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from sparse_kvcm._core import cuda_unavailable_reason, memory_placement_error, read_host_limits
from sparse_kvcm.byte_counts import show_bytes
from sparse_kvcm.sizing.host_memory import HostTerm, host_memory

NVIDIA = "0x10de"
# What to do about a reason without CUDA, by words in it.
_DRIVER_FIXES = {
    "no CUDA backend": "install again with nvcc in the path, or with SPARSE_KVCM_CUDA=ON",
    "driver version is insufficient": "install an NVIDIA driver, or a newer one",
    "no CUDA-capable device": "give the container its GPUs (Docker: --gpus all), and see that "
    "CUDA_VISIBLE_DEVICES does not hide them",
}


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, what was found, and what to do if that is not good."""

    name: str
    found: str
    fix: str = ""


def examine(local_ranks: int = 1, root: str = "") -> list[Finding]:
    """Look at the machine; `root` stands for ``/`` in tests."""
    return [
        _driver(),
        *_links(Path(f"{root}/sys/bus/pci/devices")),
        *_host(local_ranks, root),
        _huge_pages(Path(f"{root}/sys/kernel/mm/transparent_hugepage/enabled")),
        _numa(Path(f"{root}/sys/devices/system/node")),
    ]


def doctor(
    local_ranks: Annotated[int, typer.Option(help="Ranks that share the machine.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
) -> None:
    """Say what would be pinned on this machine, and what to fix."""
    findings = examine(local_ranks)
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
        return
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        typer.echo(f"{finding.name:<{width}}  {finding.found}")
        if finding.fix:
            typer.echo(f"{'':<{width}}  -> {finding.fix}")


def _driver() -> Finding:
    reason = cuda_unavailable_reason()
    if not reason:
        return Finding("driver", "CUDA is available")
    fixes = (fix for words, fix in _DRIVER_FIXES.items() if words in reason)
    return Finding("driver", reason, next(fixes, "see whether nvidia-smi works"))


def _links(devices: Path) -> list[Finding]:
    findings = []
    for device in sorted(devices.glob("*")):
        is_gpu = _read(device / "class").startswith("0x03")
        if _read(device / "vendor") != NVIDIA or not is_gpu:
            continue
        speed, width = _read(device / "current_link_speed"), _read(device / "current_link_width")
        most = _read(device / "max_link_width")
        fix = "" if width == most else f"the slot or riser gives {width} lanes of {most}"
        findings.append(Finding(f"link {device.name}", f"{speed} x{width}", fix))
    return findings or [Finding("link", "no NVIDIA GPU on the PCI bus")]


def _host(local_ranks: int, root: str) -> list[Finding]:
    limits = read_host_limits(root)
    memory = host_memory(local_ranks, limits=limits)
    findings = [Finding(memory.name(term), show_bytes(left)) for term, left in memory.terms.items()]
    if limits.group_left is None:
        findings.append(Finding("control group", "no memory limit"))
    if limits.memlock is None:
        findings.append(Finding("memlock", "no limit"))
    is_low = memory.binding in (HostTerm.MEMLOCK, None)
    pinned = (
        f"{show_bytes(memory.automatic)} by itself, {show_bytes(memory.per_rank)} at most "
        f"({memory.limit}, {local_ranks} {'rank' if local_ranks == 1 else 'ranks'})"
    )
    findings.append(Finding("would be pinned by a rank", pinned, memory.advice if is_low else ""))
    return findings


def _huge_pages(path: Path) -> Finding:
    text = _read(path)
    chosen = text[text.find("[") + 1 : text.find("]")] if "[" in text else "not known"
    asked = os.environ.get("SPARSE_KVCM_THP", "1") != "0"
    fix = ""
    if chosen == "never" and asked:
        fix = f"echo madvise > {path}: pages of 4 KiB take longer to touch and to register"
    found = f"{chosen}, " + ("asked for" if asked else "not asked for (SPARSE_KVCM_THP=0)")
    return Finding("huge pages", found, fix)


def _numa(path: Path) -> Finding:
    nodes = len(list(path.glob("node[0-9]*")))
    found = str(nodes) if nodes else "not known"
    error = memory_placement_error() if nodes > 1 else ""
    if not error:
        return Finding("NUMA nodes", found)
    fix = "a container needs --cap-add SYS_NICE to place memory near the GPU"
    return Finding("NUMA nodes", f"{found}, memory cannot be placed: {error}", fix)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
