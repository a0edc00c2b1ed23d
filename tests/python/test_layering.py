"""The arrows between the folders of cpp/ point one way, and the rules that keep them so.

    bindings -> manager -> {storage, sparse} -> backend -> core -> public headers

cpu, cuda and no_cuda implement backend, and nobody includes them.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CPP = ROOT / "cpp"

PUBLIC = "sparse_kvcm"
BELOW_BACKEND = {"backend", "core", PUBLIC}
MAY_INCLUDE = {
    PUBLIC: {PUBLIC},
    "core": {"core", PUBLIC},
    "backend": BELOW_BACKEND,
    "storage": {"storage", *BELOW_BACKEND},
    "sparse": {"sparse", *BELOW_BACKEND},
    "manager": {"manager", "storage", "sparse", *BELOW_BACKEND},
    "bindings": {"bindings", "manager", "core", PUBLIC},
    "cpu": {"cpu", *BELOW_BACKEND},
    "cuda": {"cuda", *BELOW_BACKEND},
    "no_cuda": {"no_cuda", *BELOW_BACKEND},
}
FOREIGN = {  # quoted or bracketed includes by their beginning, and the folders that may have them
    "cuda": {"cuda"},
    "cub/": {"cuda"},
    "cooperative_groups": {"cuda"},
    "nanobind": {"bindings"},
    "Python.h": {"bindings"},
    "torch": set(),
    "ATen": set(),
    "c10": set(),
}
# What device code may read besides its own: the contract, and what all backends share of it.
DEVICE_CONSTANTS = {
    "core/row_state.hpp",
    "sparse_kvcm/entry.hpp",
    "sparse_kvcm/ops.hpp",
    "sparse_kvcm/types.hpp",
}
DEVICE_RUNTIME = ("cub/", "cooperative_groups", "cuda_", "cuda/", "mma.h", "nv/")

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
CONDITIONAL = re.compile(r"^\s*#\s*(?:if|ifdef|ifndef|elif)\b.*$", re.MULTILINE)
DEVICE_WORD = re.compile(r"CUDA|NVCC|GPU|HIP|DEVICE", re.IGNORECASE)


def folder_of(path: str) -> str:
    """Name the layer of a file under cpp/, e.g. "manager" of src/manager/batch.cpp."""
    parts = path.split("/")
    return {"include": PUBLIC, "src": parts[1]}.get(parts[0], parts[0])


def bad_includes(path: str, text: str) -> list[str]:
    """List what the file at `path` (under cpp/) includes against the arrows."""
    folder = folder_of(path)
    faults = []
    for kind, target in INCLUDE.findall(text):
        head = target.split("/")[0] if "/" in target else folder
        ours = head in MAY_INCLUDE and kind == '"'
        if ours and head not in MAY_INCLUDE[folder]:
            faults.append(f"{path}: {folder} must not include {target}")
        if folder == PUBLIC and kind == '"' and not target.startswith(f"{PUBLIC}/"):
            faults.append(f"{path}: a public header must not include {target}")
        if not ours:
            faults += [
                f"{path}: {folder} must not include {target}"
                for start, allowed in FOREIGN.items()
                if target.startswith(start) and folder not in allowed
            ]
    return faults


def bad_device_includes(path: str, text: str) -> list[str]:
    """List what device-only code takes from outside its folder, standard headers aside."""
    faults = []
    for kind, target in INCLUDE.findall(text):
        own = target.startswith("cuda/device/") or target in DEVICE_CONSTANTS
        foreign = kind == "<" and ("/" not in target or target.startswith(DEVICE_RUNTIME))
        if not (own or foreign):
            faults.append(f"{path}: device code must not include {target}")
    return faults


def device_conditionals(path: str, text: str) -> list[str]:
    """List preprocessor conditions on a device: the seam is chosen by CMake and at run time."""
    return [
        f"{path}: {line.strip()}" for line in CONDITIONAL.findall(text) if DEVICE_WORD.search(line)
    ]


def files(*suffixes: str, below: Path) -> dict[str, str]:
    """Read the files below a folder, by their path relative to it."""
    found = sorted(path for path in below.rglob("*") if path.suffix in suffixes)
    return {path.relative_to(below).as_posix(): path.read_text() for path in found}


def layered_files() -> dict[str, str]:
    """Read the sources that the arrows are about."""
    sources = files(".hpp", ".cpp", ".cu", ".cuh", below=CPP)
    return {path: text for path, text in sources.items() if folder_of(path) in MAY_INCLUDE}


def test_no_include_points_back() -> None:
    faults = [fault for path, text in layered_files().items() for fault in bad_includes(path, text)]
    assert faults == []


def test_device_code_includes_only_device_code_and_public_constants() -> None:
    faults = [
        fault
        for path, text in layered_files().items()
        if path.startswith("src/cuda/device/")
        for fault in bad_device_includes(path, text)
    ]
    assert faults == []


def test_no_source_asks_the_preprocessor_for_a_device() -> None:
    sources = files(".hpp", ".cpp", ".cu", ".cuh", below=CPP)
    faults = [fault for path, text in sources.items() for fault in device_conditionals(path, text)]
    assert faults == []


def test_files_end_before_400_lines() -> None:
    suffixes = (".hpp", ".cpp", ".cu", ".cuh", ".py", ".pyi")
    folders = [CPP, *(ROOT / name for name in ("python", "benchmarks", "tests", "scripts"))]
    sizes = {
        f"{folder.name}/{path}": text.count("\n")
        for folder in folders
        for path, text in files(*suffixes, below=folder).items()
    }
    assert {path: size for path, size in sizes.items() if size > 400} == {}


def test_every_folder_of_the_library_has_an_arrow() -> None:
    folders = {path.name for path in (CPP / "src").iterdir() if path.is_dir()}
    assert folders <= set(MAY_INCLUDE)


@pytest.mark.parametrize(
    ("path", "include"),
    [
        ("src/core/a.cpp", '"backend/backend.hpp"'),
        ("src/backend/a.cpp", '"cpu/cpu_backend.hpp"'),
        ("src/storage/a.cpp", '"sparse/arena.hpp"'),
        ("src/sparse/a.hpp", '"manager/batch_state.hpp"'),
        ("src/manager/a.cpp", '"cuda/cuda_backend.hpp"'),
        ("src/cpu/a.cpp", '"manager/request.hpp"'),
        ("src/manager/a.cpp", "<cuda_runtime_api.h>"),
        ("src/backend/a.cpp", "<nanobind/nanobind.h>"),
        ("bindings/a.cpp", "<torch/extension.h>"),
        ("include/sparse_kvcm/a.hpp", '"core/check.hpp"'),
        ("include/sparse_kvcm/a.hpp", "<cuda_runtime.h>"),
    ],
)
def test_an_arrow_that_points_back_is_caught(path: str, include: str) -> None:
    assert len(bad_includes(path, f"#pragma once\n\n#include {include}\n")) >= 1


@pytest.mark.parametrize(
    ("path", "include"),
    [
        ("src/manager/a.cpp", '"storage/page_allocator.hpp"'),
        ("src/cuda/a.cu", "<cuda_runtime_api.h>"),
        ("src/cuda/a.cu", '"cuda/device/seat.cuh"'),
        ("bindings/a.cpp", "<nanobind/nanobind.h>"),
        ("include/sparse_kvcm/a.hpp", '"sparse_kvcm/types.hpp"'),
        ("include/sparse_kvcm/a.hpp", "<vector>"),
    ],
)
def test_an_arrow_that_points_down_passes(path: str, include: str) -> None:
    assert bad_includes(path, f"#include {include}\n") == []


def test_a_device_file_that_reaches_out_is_caught() -> None:
    include = '#include "cuda/kernels.hpp"\n#include "sparse_kvcm/types.hpp"\n#include <cstdint>\n'
    faults = bad_device_includes("src/cuda/device/a.cuh", include)
    assert faults == ["src/cuda/device/a.cuh: device code must not include cuda/kernels.hpp"]


@pytest.mark.parametrize("line", ["#ifdef __CUDACC__", "#  if defined(SPARSE_KVCM_HAS_CUDA)"])
def test_a_condition_on_a_device_is_caught(line: str) -> None:
    assert device_conditionals("a.cpp", f"#pragma once\n{line}\n#endif\n") == [f"a.cpp: {line}"]
