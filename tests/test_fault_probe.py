"""The check of a host: who computes other bits is named, and who does not answer is not waited for."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.fault.torch_self_check import check, verdict
from headway.verbs.jobs.fault import probe
from tests.refusals import refused


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=12))
def test_suspected_is_who_differs_from_more_than_half_and_everybody_without_such_a_half(found):
    digests = dict(enumerate(found))
    common, count = Counter(found).most_common(1)[0]
    agreed = 2 * count > len(found)

    assert verdict(digests) == [rank for rank, one in digests.items() if not agreed or one != common]


@pytest.mark.slow
def test_the_ranks_of_a_sound_host_end_with_the_same_bits(capsys):
    assert probe(nproc_per_node="2", json=True) == 0
    answer = json.loads(capsys.readouterr().out)

    assert answer["equal"]
    assert len({*answer["digests"].values()}) == 1
    assert sorted(answer["digests"]) == ["0", "1"]


def test_a_check_that_does_not_return_ends_at_its_deadline_and_names_the_ranks():
    found = check(2, timeout_s=0.05)

    assert found.odd == [0, 1]
    assert found.failed[1] == "no answer within 0.05 s"


test_a_deadline_or_a_number_of_ranks_that_cannot_be_is_one_error = refused(
    (lambda: check(2, timeout_s=0), r"--timeout-s is 0.*Pass 60"),
    (lambda: check(0, timeout_s=9), r"--nproc-per-node is 0"),
)
