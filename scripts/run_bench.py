"""Runs the benchmark program, prints its figures as a table and writes them as JSON records.

With --tune it sweeps the rows that fetch keeps in flight and writes the tuning table instead.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import tune_fetch

COLUMNS = ("bench", "case", "value", "unit", "limit", "share")


def output_of(*command: str) -> str:
    """Return the standard output of a command, or "" if there is no such command or it fails."""
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def device_name(device: str) -> str:
    """Name the machine that a figure belongs to."""
    if device.startswith("cuda"):
        index = device.partition(":")[2] or "0"
        name = output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader", "-i", index)
        return name or device
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    models = [line.partition(":")[2].strip() for line in info.splitlines() if "model name" in line]
    return f"{models[0] if models else 'CPU'}, {len(os.sched_getaffinity(0))} cores"


def commit() -> str:
    """Return the commit of the checkout, marked with + if files differ from it; "" without git."""
    name = output_of("git", "rev-parse", "--short", "HEAD")
    return name + ("+" if name and output_of("git", "status", "--porcelain") else "")


def cell(value: object) -> str:
    """Format one cell of the table."""
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str) -> None:
    """Print a table, with rich where it is installed."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
        print(title)
        for row in [columns, *rows]:
            print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)))
        return
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column in ("bench", "case", "unit") else "right")
    for row in rows:
        table.add_row(*row)
    # A row too long for the window goes on in its next line; squeezed columns say nothing.
    wanted = Console(width=1000).measure(table).maximum
    Console(width=max(Console().width, wanted)).print(table)


def check_writable(path: Path) -> None:
    """Raise OSError if a file cannot be written; make its folder, but not the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    existed = path.exists()
    path.open("a").close()
    if not existed:
        path.unlink()


def main() -> int:
    """Run, print and write."""
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.add_argument("program", help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run (default: all)")
    parser.add_argument("--device", help="cpu (the default), cuda or cuda:<index>")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the records")
    parser.add_argument("--list", action="store_true", help="show the names and run nothing")
    parser.add_argument("--tune", action="store_true", help=f"sweep, and write {tune_fetch.TABLE}")
    arguments = parser.parse_intermixed_args()
    device = arguments.device or ("cuda" if arguments.tune else "cpu")

    command = [arguments.program, "--device", device, *arguments.names]
    if arguments.tune:
        command.append("--tune")
    if arguments.list:
        return subprocess.run([*command, "--list"], check=False).returncode
    if arguments.json:  # now, not after minutes of benchmarks
        try:
            check_writable(arguments.json)
        except OSError as error:
            parser.error(f"--json must be a writable file, got {arguments.json}: {error}")
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if run.returncode != 0 and (arguments.tune or not run.stdout):
        return run.returncode

    about = {
        "device": device_name(device),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "commit": commit(),
    }
    figures = [json.loads(line) for line in run.stdout.splitlines()]
    if arguments.tune:
        points = [tune_fetch.Point(**point) for point in figures]
        tune_fetch.tune(points, about, tune_fetch.TABLE, print_table)
    else:
        rows = [[cell(record[column]) for column in COLUMNS] for record in figures]
        print_table(COLUMNS, rows, about["device"])
    records = [record | about for record in figures]
    if arguments.json:
        arguments.json.write_text(json.dumps(records, indent=1) + "\n")
    return run.returncode  # of the cases that have no figure, the program said why


if __name__ == "__main__":
    sys.exit(main())
