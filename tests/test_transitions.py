"""What a change of scheme moves: the published costs, and that the cheap ways are cheap."""

import itertools

import pytest

from headway.lab.schemes import METHODS, SCHEMES, Transition, cheaper_in_bulk

PAIRS = [
    pair
    for pair in itertools.permutations(SCHEMES.values(), 2)
    if {pair[0].k, pair[1].k} <= {6, 10, 30}
]  # fmt: skip


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda scheme: scheme.name)
def test_emptying_is_k_times_and_new_parities_n_times_cheaper_than_reencoding(source, target):
    whole = METHODS["re-encode"](source, target)

    assert METHODS["type 1"](source, target) * source.k == whole
    assert METHODS["type 2"](source, target) * source.n <= whole
    assert METHODS["type 2"](source, target) == pytest.approx(source.k / source.n * target.n / target.k)


def test_few_disks_are_emptied_and_most_of_an_rgroup_changes_as_a_whole():
    source, target = SCHEMES["30-of-33"], SCHEMES["24-of-27"]

    assert not cheaper_in_bulk(0.1, source, target)
    assert cheaper_in_bulk(0.6, source, target)


def test_a_transition_says_all_of_itself():
    change = Transition(3, "down", "type 2", ("st4",), "st4, day 0", "6-of-9", "30-of-33", 9000, 1e15, None)

    assert change.to_json()["target"] == "30-of-33"
    assert change.to_json()["urgent"] is False
