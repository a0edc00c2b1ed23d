"""`generate` of a stock DeepSeek-V4 with a managed cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

import tiny_v4
from sparse_kvcm.integrations.transformers.deepseek_v4 import ManagedV4Cache, attach

MODES = pytest.mark.parametrize("offload", [False, True], ids=["resident", "offload"])


def generate(ids: torch.Tensor, held: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out = tiny_v4.model().generate(
        ids,
        cache=held,
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
            made(input_ids=prompts(3), attention_mask=mask, cache=held)
        with pytest.raises(ValueError, match="max_length = 10"):
            made(input_ids=prompts(11), cache=held)
        made(input_ids=prompts(3), cache=held)
        assert held.get_seq_length() == 3
        with pytest.raises(NotImplementedError, match="one token of each of its 3"):
            made(input_ids=prompts(2), cache=held)
        with pytest.raises(NotImplementedError, match="crop"):
            held.crop(1)
        made(input_ids=prompts(1), cache=held)
        assert held.get_seq_length() == 4
        held.close()
    assert manager.store.manager.occupancy().free_leases == 3


def test_a_manager_of_another_model_is_refused() -> None:
    import dataclasses

    geometry = dataclasses.replace(tiny_v4.manager(False).config.geometry, top_k=8)
    with pytest.raises(ValueError, match="top_k of the manager must be 16"):
        ManagedV4Cache(tiny_v4.model(), tiny_v4.manager(False, geometry=geometry), max_length=9)
