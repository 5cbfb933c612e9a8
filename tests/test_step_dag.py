"""The steady state of steps that follow each other, with and without overlap."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.sim.graph.hops import Network
from headway.sim.step_view import StepView, steady_ns
from headway.sim.training_step import TrainingStep
from tests.made.step_blocks import Block, profile_of
from tests.steps_made import WIRE, few, networks, steps

small = steps(network=networks(ranks=st.integers(1, 3)))


@few
@given(step=small)
def test_without_overlap_steady_steps_take_as_long_as_one(step: TrainingStep) -> None:
    assert steady_ns(step) == int(StepView.of(step).score([step])[0])


def overlapping(sizes: tuple[int, int] = (4_000_000, 4_000_000)) -> TrainingStep:
    """Two blocks on parameter servers, of which the next forward pass needs the one that is ready last first."""
    profile = profile_of(
        [Block((800_000,), (800_000,), (sizes[0],)), Block((800_000,), (800_000,), (sizes[1],))],
        update_ns=2000,
        overlaps_forward=True,
    )
    return TrainingStep.of(profile, Network("parameter_server", 2, WIRE, num_servers=2))


def test_what_forward_needs_first_overtakes_and_shortens_the_steady_step() -> None:
    step = overlapping()
    cut = replace(step, parts=np.array([8, 8]))

    ready, forward = steady_ns(cut), steady_ns(replace(cut, order="forward"))

    assert forward < 0.95 * ready
    assert forward >= max(3_202_000, 2 * 4_000_000)  # compute, and what each lane carries


def test_overlapped_forward_passes_are_faster_than_waiting_for_all_updates() -> None:
    step = replace(overlapping(), order="forward", parts=np.array([8, 8]))
    waiting = replace(step, profile=replace(step.profile, overlaps_forward=False))

    assert steady_ns(step) < 0.95 * steady_ns(waiting)


def test_a_steady_state_needs_three_steps() -> None:
    with pytest.raises(InputError, match=r"num_steps is 2; a steady state needs at least 3"):
        steady_ns(overlapping(), num_steps=2)
