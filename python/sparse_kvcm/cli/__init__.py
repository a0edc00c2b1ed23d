"""The command ``sparse-kvcm``."""

from __future__ import annotations

import sys

import typer

from sparse_kvcm._core import InvalidArgument, NotAvailable
from sparse_kvcm.cli.doctor import doctor
from sparse_kvcm.cli.plan import plan
from sparse_kvcm.cli.schema import schema

__all__ = ["app", "main"]

app = typer.Typer(
    name="sparse-kvcm",
    help="Plan and check KV caches whose history is on the host.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(plan)
app.command()(doctor)
app.command()(schema)


def main() -> None:
    """Run the command; a bad argument is one line on stderr and status 2."""
    try:
        app()
    except (InvalidArgument, NotAvailable) as error:
        typer.echo(f"sparse-kvcm: {error}", err=True)
        sys.exit(2)
