"""`generate` of a stock DeepSeek-V4 with a managed cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

import tiny_v4
from sparse_kvcm.integrations.transformers.deepseek_v4 import (
    ManagedV4Cache,
    V4StepDriver,
    attach,
)

MODES = pytest.mark.parametrize("offload", [False, True], ids=["resident", "offload"])


def generate(ids: torch.Tensor, held: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out = tiny_v4.model().generate(
        ids,
        **tiny_v4.kept_in(held),
        max_new_tokens=14,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )
    return out.sequences, torch.stack(out.logits)


def prompts(length: int) -> torch.Tensor:
    return torch.stack([tiny_v4.prompt(seed, length) for seed in (7, 8, 9)])


@MODES
@pytest.mark.parametrize("length", [2, 117, 254])
def test_a_batch_of_one_length_gives_the_stock_logits(offload: bool, length: int) -> None:
    made, ids = tiny_v4.model(), prompts(length)
    expected = generate(ids, DynamicCache(config=made.config))
    with attach(made):
        held = ManagedV4Cache(made, tiny_v4.manager(offload), max_length=length + 14)
        for _ in range(2):  # a cache that was reset serves again
            tokens, logits = generate(ids, held)
            assert torch.equal(tokens, expected[0])
            assert torch.equal(logits, expected[1])
            held.reset()
        # A model with hooks still takes its own cache.
        again = generate(ids, DynamicCache(config=made.config))
    assert torch.equal(again[1], expected[1])


def test_what_a_cache_cannot_do_is_said() -> None:
    made, manager = tiny_v4.model(), tiny_v4.manager(True)
    with pytest.raises(ValueError, match="form must be one of"):
        ManagedV4Cache(made, manager, max_length=10, form="dense")  # type: ignore[arg-type]
    with attach(made), torch.no_grad():
        held = ManagedV4Cache(made, manager, max_length=10)
        mask = torch.tensor([[0, 1, 1], [1, 1, 1], [1, 1, 1]])
        with pytest.raises(NotImplementedError, match="no padding"):
            made(input_ids=prompts(3), attention_mask=mask, **tiny_v4.kept_in(held))
        with pytest.raises(ValueError, match="max_length = 10"):
            made(input_ids=prompts(11), **tiny_v4.kept_in(held))
        made(input_ids=prompts(3), **tiny_v4.kept_in(held))
        assert held.get_seq_length() == 3
        with pytest.raises(NotImplementedError, match="one token of each of its 3"):
            made(input_ids=prompts(2), **tiny_v4.kept_in(held))
        with pytest.raises(NotImplementedError, match="crop"):
            held.crop(1)
        made(input_ids=prompts(1), **tiny_v4.kept_in(held))
        assert held.get_seq_length() == 4
        held.close()
    assert manager.store.manager.occupancy().free_leases == 3


# --- prompts of different lengths, padded to one ---

LENGTHS = (9, 117, 60)


def padded(side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask, int64 [3, 117]."""
    ids = torch.full((3, max(LENGTHS)), tiny_v4.VOCABULARY - 1)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(LENGTHS):
        at = slice(-length, None) if side == "left" else slice(0, length)
        ids[row, at], mask[row, at] = tiny_v4.prompt(row, length), 1
    return ids, mask


@MODES
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_refused_and_the_cache_still_serves(offload: bool, side: str) -> None:
    """Stock compressors would make entries of padding, whatever the cache."""
    made, (ids, mask) = tiny_v4.model(), padded(side)
    message = r"no padding, got \[108, 0, 57\] tokens .* use a V4StepDriver"
    expected = generate(prompts(62), DynamicCache(config=made.config))
    with attach(made):
        manager = tiny_v4.manager(offload)
        held = ManagedV4Cache(made, manager, max_length=140)
        with pytest.raises(NotImplementedError, match=message):
            generate(ids, held, attention_mask=mask)
        with pytest.raises(NotImplementedError, match="no padding"):  # generate makes the mask
            generate(ids, held, pad_token_id=tiny_v4.VOCABULARY - 1)
        assert held.get_seq_length() == 0
        assert not held.state.requests
        tokens, logits = generate(prompts(62), held)
        assert torch.equal(tokens, expected[0])
        assert torch.equal(logits, expected[1])
        held.close()


@MODES
def test_the_way_that_the_refusal_names_gives_each_request_s_own_tokens(offload: bool) -> None:
    ids, mask = padded("left")
    with V4StepDriver(tiny_v4.model(), tiny_v4.manager(offload)) as driver:
        requests = [driver.add(row[kept.bool()], 14) for row, kept in zip(ids, mask, strict=True)]
        while driver.requests:
            driver.step()
    for row, (one, length) in enumerate(zip(requests, LENGTHS, strict=True)):
        assert one.tokens == tiny_v4.stock(row, length, 14)[0]


@MODES
def test_padding_in_the_middle_of_decoding_changes_nothing(offload: bool) -> None:
    made = tiny_v4.model()
    with attach(made), torch.no_grad():
        held = ManagedV4Cache(made, tiny_v4.manager(offload), max_length=80)
        twin = DynamicCache(config=made.config)
        for one in (held, twin):
            made(input_ids=prompts(62), **tiny_v4.kept_in(one))
        last, ones = torch.tensor([[3], [4], [5]]), torch.ones(3, 63, dtype=torch.int64)
        hole = ones.clone()
        hole[1, 5] = 0
        square = torch.zeros(3, 1, 1, 63)
        positions = torch.tensor([[62], [61], [62]])
        for wrong, message in (
            ({"attention_mask": hole}, r"got \[0, 1, 0\] tokens"),
            (
                {"attention_mask": square},
                r"\(requests, tokens\) or None, got shape \(3, 1, 1, 63\)",
            ),
            ({"attention_mask": {"sliding_attention": square}}, "or None, got <class 'dict'>"),
            ({"position_ids": positions}, r"position_ids must be 62 to 62 in each row, got .*61"),
        ):
            with pytest.raises(NotImplementedError, match=message):
                made(input_ids=last, **tiny_v4.kept_in(held), **wrong)
            assert held.get_seq_length() == 62
        for fine in ({"attention_mask": ones}, {}, {"position_ids": torch.tensor([[64]] * 3)}):
            found, wanted = (
                made(input_ids=last, **tiny_v4.kept_in(one), **fine).logits for one in (held, twin)
            )
            assert torch.equal(found, wanted)


def test_a_manager_of_another_model_is_refused() -> None:
    import dataclasses

    geometry = dataclasses.replace(tiny_v4.manager(False).config.geometry, top_k=8)
    with pytest.raises(ValueError, match="top_k of the manager must be 16"):
        ManagedV4Cache(tiny_v4.model(), tiny_v4.manager(False, geometry=geometry), max_length=9)
