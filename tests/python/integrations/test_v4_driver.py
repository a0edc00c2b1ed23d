"""Stock DeepSeek-V4 on a manager: the stock cache's tokens, and its logits bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sparse_kvcm as kvcm
import tiny_v4
from sparse_kvcm.integrations.transformers.deepseek_v4 import V4Request, V4StepDriver
from sparse_kvcm.integrations.transformers.driver import RequestState

MODES = pytest.mark.parametrize("offload", [False, True], ids=["resident", "offload"])


class Checked:
    """A driver that keeps logits; requests are known by the seed of their prompt."""

    def __init__(self, offload: bool, form: Any = "scatter", **changes: Any) -> None:
        self.manager = tiny_v4.manager(offload, **changes)
        self.driver = V4StepDriver(tiny_v4.model(), self.manager, form=form, sample=self._sample)
        self.logits: dict[int, list[torch.Tensor]] = {}
        self.made: dict[int, V4Request] = {}
        self._coming = -1

    def _sample(self, logits: torch.Tensor, request: V4Request) -> int:
        seeds = [seed for seed, one in self.made.items() if one is request]
        self.logits.setdefault(seeds[0] if seeds else self._coming, []).append(logits)
        return int(logits.argmax())

    def add(self, seed: int, length: int, new_tokens: int) -> V4Request:
        self._coming = seed
        self.made[seed] = self.driver.add(tiny_v4.prompt(seed, length), new_tokens)
        return self.made[seed]

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.driver.step()

    def check(self, *, exact: bool = True) -> None:
        for seed, one in self.made.items():
            assert one.state is RequestState.FINISHED
            tokens, logits = tiny_v4.stock(seed, one.prompt_length, one.max_new_tokens)
            assert one.tokens == tokens
            if exact:
                assert torch.equal(torch.stack(self.logits[seed]), logits)

    def __enter__(self) -> Checked:
        return self

    def __exit__(self, *error: object) -> None:
        self.driver.close()


@MODES
@pytest.mark.parametrize("page", [128, 256])
def test_requests_of_any_lengths_decode_in_one_step(offload: bool, page: int) -> None:
    with Checked(offload, tokens_per_block=page) as run:
        run.add(1, 251, 12)  # closes a page and an entry of ratio 128 on the way
        run.add(2, 406, 12)
        run.add(3, 122, 12)
        run.step(11)
        run.check()


# Without an entry, with fewer than top-k, around a group, the window, and a page.
@MODES
@pytest.mark.parametrize("length", [1, 2, 3, 4, 7, 8, 9, 38, 39, 40, 62, 65, 127, 128, 129])
def test_short_prompts_decode(offload: bool, length: int) -> None:
    with Checked(offload) as run:
        run.add(length, length, 10)
        run.step(9)
        run.check()


@MODES
def test_requests_join_leave_suspend_and_resume(offload: bool) -> None:
    with Checked(offload) as run:
        first = run.add(1, 130, 40)
        second = run.add(2, 299, 20)
        run.step(6)
        run.driver.suspend(second)
        run.add(3, 53, 9)
        run.step(5)
        run.driver.suspend(first)
        run.step(2)
        run.driver.resume(second)
        run.step(4)
        run.driver.resume(first)
        run.add(4, 127, 5)
        while run.driver.requests:
            run.step()
        run.check()


@MODES
def test_selected_entries_side_by_side_give_the_same_tokens(offload: bool) -> None:
    with Checked(offload, "compact") as run:
        run.add(1, 251, 12)
        run.add(2, 30, 12)
        run.step(11)
        run.check(exact=False)


@MODES
def test_a_step_that_failed_in_any_layer_can_be_run_again(offload: bool) -> None:
    with Checked(offload) as run:
        run.add(1, 251, 20)
        run.add(2, 93, 20)
        for count in range(10):
            layer = tiny_v4.model().model.layers[count % 4]
            calls = []

            def fail(*args: Any, calls: list[int] = calls) -> None:
                calls.append(1)
                if len(calls) == 2:  # in the second request's forward
                    raise ZeroDivisionError("on purpose")

            handle = layer.mlp.register_forward_pre_hook(fail)
            with pytest.raises(ZeroDivisionError):
                run.driver.step()
            handle.remove()
            assert run.manager.step is None
            del run.logits[1][-1]
            run.step()
        run.step(9)
        run.check()


@MODES
def test_misses_are_fetched_where_histories_do_not_fit(offload: bool) -> None:
    with Checked(offload) as run:
        request = run.add(1, 600, 30)
        run.step(28)
        assert (request.misses > 0) is offload
        run.step()
        run.check()


@MODES
def test_entries_of_another_place_change_the_logits(
    offload: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison can fail."""
    with Checked(offload) as run:
        run.add(1, 251, 6)
        select = run.manager.select

        def wrong(layer: int, names: torch.Tensor, at: Any) -> torch.Tensor:
            slots = select(layer, names, at)
            return slots[:, :1].expand_as(slots)  # one entry in all places

        monkeypatch.setattr(run.manager, "select", wrong)
        run.step(5)
        _, logits = tiny_v4.stock(1, 251, 6)
        assert not torch.equal(torch.stack(run.logits[1]), logits)


def test_what_a_driver_cannot_do_is_said() -> None:
    with Checked(True) as run:
        with pytest.raises(ValueError, match="at least 1 token"):
            run.driver.add([], 3)
        with pytest.raises(ValueError, match="vocabulary"):
            run.driver.add([999], 3)
        with pytest.raises(ValueError, match="max_length must be <= 700"):
            run.driver.add([1] * 600, 200)
        request = run.add(1, 20, 3)
        with pytest.raises(kvcm.InvalidState, match="suspended, it is active"):
            run.driver.resume(request)
        run.driver.remove(request)
        with pytest.raises(kvcm.InvalidState, match="it is finished"):
            run.driver.suspend(request)
    assert not tiny_v4.model().model._forward_hooks


@pytest.mark.parametrize("form", ["other", None, [], "Triton"])
def test_an_unknown_form_is_refused_when_the_driver_is_made(form: Any) -> None:
    with pytest.raises(ValueError, match=r"\[V4StepDriver\] form must be one of scatter, compact"):
        V4StepDriver(tiny_v4.model(), tiny_v4.manager(False), form=form)


def test_what_is_no_model_is_refused_when_the_driver_is_made() -> None:
    with pytest.raises(ValueError, match=r"\[V4StepDriver\] model must be a transformers model"):
        V4StepDriver(None, tiny_v4.manager(False))  # type: ignore[arg-type]
