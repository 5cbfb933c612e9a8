"""Named random streams."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.core.rng import derived_seed, stream

names = st.lists(st.text(max_size=4) | st.integers(-5, 5), max_size=3)


@given(st.integers(0, 2**70), names, names)
def test_streams_are_equal_exactly_when_their_names_are(seed: int, one: list, two: list) -> None:
    same = [(type(a), a) for a in one] == [(type(b), b) for b in two]

    assert (derived_seed(seed, *one) == derived_seed(seed, *two)) == same
    assert (stream(seed, *one).random(3) == stream(seed, *two).random(3)).all() == same


@given(st.integers(0, 10**6))
def test_another_seed_is_another_stream(seed: int) -> None:
    assert derived_seed(seed, "a") != derived_seed(seed + 1, "a")


def test_numpy_integers_name_the_same_stream_as_python_ones() -> None:
    assert derived_seed(1, np.int64(3)) == derived_seed(np.int64(1), 3)


def test_a_stream_is_the_same_in_another_process() -> None:
    code = "from headway.core.rng import stream; print(stream(7, 'failures', 3).integers(1 << 60))"
    answers = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": salt}, capture_output=True, text=True, check=True
        ).stdout.strip()
        for salt in ("1", "2")
    }

    assert answers == {str(stream(7, "failures", 3).integers(1 << 60))}


def test_many_streams_together_look_uniform() -> None:
    firsts = np.array([stream(0, "rank", rank).random() for rank in range(4000)])

    assert abs(firsts.mean() - 0.5) < 4 / np.sqrt(12 * 4000)
    assert abs(np.corrcoef(firsts[:-1], firsts[1:])[0, 1]) < 4 / np.sqrt(4000)


@pytest.mark.parametrize("seed", [-1, 1.5, True, "7"])
def test_bad_seeds_are_refused(seed: object) -> None:
    with pytest.raises(InputError, match=r"pass a whole number >= 0"):
        stream(seed, "a")  # type: ignore[arg-type]  # the point of the test


def test_bad_names_are_refused() -> None:
    with pytest.raises(InputError, match=r"1\.5 in the name of a random stream is float; use strings and integers"):
        stream(1, 1.5)  # type: ignore[arg-type]  # the point of the test
