"""A loader's state taken at every place: before a pass, in it, at its end, between two, after the last one."""

import pytest
import torch

from benchmarks.jobs.resume_kinds import ITEMS, SAMPLED, STREAMED, after, once_each, places, plain, played, rest, served
from headway.data.fleet.torch_fleet import Fleet
from tests.served_made import end, only, runtime  # noqa: F401 - servers of these tests have a folder of their own

PASSES = 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*SAMPLED, *STREAMED])
def test_a_loader_goes_on_from_every_place_as_if_it_had_not_been_interrupted(kind):
    make = {**SAMPLED, **STREAMED}[kind]
    whole = played(make, PASSES)

    for place in places(whole):
        assert rest(make, place, PASSES) == after(whole, place), place


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("kind", ["workers that end apart", "rests dropped", "no batches"])
def test_workers_that_are_at_their_end_stay_there(kind, persistent):
    options = {"num_workers": 2, "persistent_workers": persistent}
    whole = played(STREAMED[kind], PASSES, **options)

    for place in places(whole)[2::2]:
        assert rest(STREAMED[kind], place, PASSES, **options) == after(whole, place), place


def test_a_loader_through_a_fleet_goes_on_from_every_place():
    whole = played(SAMPLED["own order"], PASSES)

    with Fleet(ITEMS, num_workers=2) as fleet:
        for place in places(whole):
            assert rest(lambda: fleet.batches(4, True), place, PASSES) == after(whole, place), place


@pytest.mark.slow
def test_a_served_loader_gives_each_item_once_a_pass_from_every_place_with_the_same_server_or_another(runtime):  # noqa: F811 - the fixture
    whole = played(SAMPLED["own order"], PASSES)
    for number, place in enumerate(places(whole)):
        another = place[1] > 0 and number % 3 == 0
        between = (lambda: end(only(runtime))) if another else (lambda: None)
        assert once_each(served, place, PASSES, between=between), place


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["random, own generator", "numpy and Python"])
@pytest.mark.parametrize("options", [{"num_workers": 2}, {"num_workers": 2, "workers": "threads"}])
def test_samplers_that_were_read_ahead_go_on_where_the_loop_was(kind, options):
    whole = played(SAMPLED[kind], PASSES, **options)

    for place in places(whole)[::4]:
        assert rest(SAMPLED[kind], place, PASSES, times=2, **options) == after(whole, place), place


@pytest.mark.slow
@pytest.mark.parametrize("kind", STREAMED)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_streams_give_the_batches_that_torchs_own_loader_gives(kind, num_workers):
    ours = STREAMED[kind](num_workers=num_workers)
    torchs = torch.utils.data.DataLoader(
        STREAMED[kind]().dataset, ours.batch_size, num_workers=num_workers, drop_last=ours.drop_last
    )

    assert [plain(batch) for batch in ours] == [plain(batch) for batch in torchs]
