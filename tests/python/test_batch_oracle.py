"""resolve through a Batch against the oracle, with the bytes that fetch brings."""

from hypothesis import given, settings
from hypothesis import strategies as st

from batch_program import BatchProgram


@settings(max_examples=80)
@given(seed=st.integers(0, 2**32 - 1), steps=st.integers(1, 40))
def test_life_of_requests_in_a_batch_matches_the_oracle(seed: int, steps: int) -> None:
    BatchProgram(seed).run(steps)


def test_ages_of_a_lease_saturate_in_a_batch_too() -> None:
    """300 steps, most of which no row is launched in."""
    program = BatchProgram(seed=11)
    program.run(300)
