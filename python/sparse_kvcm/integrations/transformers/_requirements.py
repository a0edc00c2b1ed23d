"""What this integration needs from the environment, refused by name when it is not there."""

from __future__ import annotations

import importlib

# From 5.18 on the cache of a DSA model holds latents; before it held keys and values per head.
MINIMUM_TRANSFORMERS = (5, 18)
EXTRA = "pip install 'sparse_kvcm[transformers]'"


def check() -> None:
    """Check that torch and a recent enough transformers can be imported.

    Raises
    ------
    ImportError
        If one of them is missing, or transformers is older than 5.18.
    """
    for name in ("torch", "transformers"):
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            raise ImportError(
                f"sparse_kvcm.integrations.transformers needs {name}, which cannot be imported "
                f"({error}). Install it with: {EXTRA}"
            ) from error
    check_version(module.__version__)


def check_version(version: str) -> None:
    """Check one version string of transformers.

    Raises
    ------
    ImportError
        If it is older than 5.18.
    """
    major, minor = (int(part) for part in version.split(".")[:2])
    if (major, minor) < MINIMUM_TRANSFORMERS:
        raise ImportError(
            "sparse_kvcm.integrations.transformers needs transformers >= 5.18, got "
            f"{version}, whose cache holds expanded keys and values instead of latents. "
            f"Update it with: {EXTRA}"
        )
