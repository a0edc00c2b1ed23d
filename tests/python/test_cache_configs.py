"""Configurations of model managers refuse each field by its name, before there is a manager."""

from __future__ import annotations

from typing import Any

import pytest

import sparse_kvcm as kvcm

torch = pytest.importorskip("torch")
import dsa_cases  # noqa: E402
import v4_cases  # noqa: E402
from sparse_kvcm.dsa import OffloadSizes  # noqa: E402

MAKE = {
    "dsa": dsa_cases.cache_config,
    "v4": lambda **changes: v4_cases.cache_config(False, **changes),
}
NAN, INF = float("nan"), float("inf")
NUMBERS = ("a", None, 1.5, True, -1, 0)
WRONG: dict[str, tuple[Any, ...]] = {
    "max_batch_size": (*NUMBERS, 2**40),
    "max_seq_len": (*NUMBERS, 2**40),
    "gpu_quota": NUMBERS,
    "tokens_per_block": ("a", 1.5, True, -1, 0, 2**40),
    "kv_dtype": ("FP8", None, 8, ["bf16"]),
    "index_dtype": ("FP8", None, 8, ["bf16"]),
    "kv_scale": ("a", None, True, 0, -1.0, NAN, INF),
    "index_scale": ("fp8", None, 1),
    "device": (None, 0),
    "geometry": (None, "glm-5.2", 7),
    "offload": (1, "x", {"cached_slots": 24}),
}
SIZES: dict[str, tuple[Any, ...]] = {
    "cached_slots": NUMBERS,
    "host_pages": NUMBERS,
    "window_slots": ("a", 1.5, True, -1, 0),
    "arena_pages": ("a", 1.5, True, -1, 0),
    "cold_quota": ("a", None, 1.5, True, -1),
}


def refused(family: str, field: str, **changes: Any) -> None:
    with pytest.raises(kvcm.InvalidArgument, match=rf"\[\w+\] {field} .*must be .*got"):
        MAKE[family](**changes)


@pytest.mark.parametrize("family", MAKE)
@pytest.mark.parametrize(("field", "wrong"), [(f, one) for f in WRONG for one in WRONG[f]])
def test_a_field_that_cannot_be_is_refused(family: str, field: str, wrong: Any) -> None:
    refused(family, rf"(?:{field})(?: of a .* model)?", **{field: wrong})


@pytest.mark.parametrize("family", MAKE)
@pytest.mark.parametrize(("field", "wrong"), [(f, one) for f in SIZES for one in SIZES[f]])
def test_a_size_that_cannot_be_is_refused(family: str, field: str, wrong: Any) -> None:
    sizes = {"cached_slots": 32, "host_pages": 100} | {field: wrong}
    refused(family, rf"offload.{field}", offload=OffloadSizes(**sizes))


@pytest.mark.parametrize("wrong", [*NUMBERS, 201])
def test_the_other_family_s_fields_are_checked_too(wrong: Any) -> None:
    if wrong is not None:
        for field in ("max_num_tokens", "avg_seq_len"):
            if (field, wrong) != ("max_num_tokens", 201):
                refused("v4", field, **{field: wrong}, max_seq_len=200)
    if wrong not in (0, 201):
        for family in MAKE:
            refused(family, "cold_quota", cold_quota=wrong)
    refused("dsa", "geometry", geometry=v4_cases.geometry())
    refused("v4", "geometry", geometry=dsa_cases.geometry())
