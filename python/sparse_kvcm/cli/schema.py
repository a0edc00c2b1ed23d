"""``sparse-kvcm schema``."""

from __future__ import annotations

import json

import typer


def schema() -> None:
    """Print the JSON schema of a worker's configuration."""
    from sparse_kvcm.config import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))
