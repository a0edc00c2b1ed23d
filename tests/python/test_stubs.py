"""The generated stub is the one that has been reviewed."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

from sparse_kvcm import _core

REFERENCE = Path(__file__).with_name("_core.pyi.ref")


def test_generated_stub_equals_the_reference() -> None:
    generated = Path(_core.__file__).with_name("_core.pyi")
    if not generated.exists():
        pytest.fail(f"no stub beside {_core.__file__}; the build makes and installs it")
    diff = list(
        difflib.unified_diff(
            REFERENCE.read_text().splitlines(),
            generated.read_text().splitlines(),
            "tests/python/_core.pyi.ref",
            "generated _core.pyi",
            lineterm="",
        )
    )
    hint = f"If the change is meant: cp {generated} {REFERENCE}"
    assert not diff, "\n".join([*diff, "", hint])
