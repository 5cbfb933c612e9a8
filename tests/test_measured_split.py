"""The split of a server's cache from its first examples: the rates are what was measured, the shares sum to one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.units import NS_PER_S
from headway.data.cached.partition import FORMS, partition_cache, repaced
from headway.data.service.batches import PreparationTime
from headway.data.service.ordering import CHUNK, LEAST, MOST_HANDOVER, WARM_UP, MeasuredSplit

MS = 1_000_000


def measured(forms=FORMS, *, fetch_ms=1.0, decode_ms=1.0, augment_ms=1.0, cache=100_000, threads=1, num=1000):
    """Examples of 100, 500 and 300 bytes, read one after the other."""
    found = MeasuredSplit(forms, num_items=num, cache_bytes=cache, num_threads=threads)
    for k in range(WARM_UP + LEAST):
        cost = 50 if k < WARM_UP else 1
        start = round(2 * k * fetch_ms * MS)
        spent = PreparationTime(
            start, start + round(fetch_ms * MS), round(cost * decode_ms * MS), round(cost * augment_ms * MS), 100
        )
        found.add({form: size for form, size in zip(FORMS, (100, 500, 300), strict=True) if form in forms}, spent)
    return found


def test_rates_are_those_of_the_examples_behind_the_warm_up():
    rates = measured(fetch_ms=2.0, decode_ms=3.0, augment_ms=1.0, threads=2).rates()

    assert rates["storage_bytes_per_s"] == pytest.approx(100 / 0.002)
    assert rates["decode_augment_per_s"] == pytest.approx(2 / 0.004)
    assert rates["augment_per_s"] == pytest.approx(2 / 0.001)


def test_reads_side_by_side_count_once():
    found = MeasuredSplit(FORMS, num_items=1, cache_bytes=1, num_threads=1)
    for start, end in ((0, 10), (5, 15), (20, 30)):
        found.add({}, PreparationTime(start, end, read_bytes=100))

    assert found.rates()["storage_bytes_per_s"] == pytest.approx(300 / 25 * NS_PER_S)


def test_bursts_of_other_work_change_nothing():
    found = measured(fetch_ms=2.0, decode_ms=3.0, num=10_000)
    quiet = found.rates()
    noisy = MeasuredSplit(FORMS, num_items=10_000, cache_bytes=1, num_threads=1)
    for k in range(WARM_UP + LEAST):
        slow = 20 if 12 <= k < 18 else 1
        spent = PreparationTime(round(100 * k * MS), round((100 * k + 2 * slow) * MS), 3 * slow * MS, slow * MS, 100)
        noisy.add({"decoded": 500}, spent)

    assert noisy.rates() == pytest.approx(quiet)


def test_slow_storage_keeps_encoded_and_slow_decoding_decoded_examples():
    assert measured(fetch_ms=50, cache=50_000).split(num_jobs=1, handover_items=0)[0] == pytest.approx(1)
    assert measured(decode_ms=50, cache=50_000).split(num_jobs=1, handover_items=0)[1] == pytest.approx(1)


def test_it_is_the_planner_s_own_answer():
    found = measured(fetch_ms=3, decode_ms=2)
    split = found.split(num_jobs=1, handover_items=0)
    planned = partition_cache(
        rates=found.rates(), sizes={"encoded": 100, "decoded": 500, "stored": 100}, n=1000, bytes=100_000,
        num_jobs=1, whole=True,
    )  # fmt: skip

    assert split == pytest.approx(planned.fractions)
    assert found.planned.examples_per_s == planned.examples_per_s


def test_the_quickest_chunk_decides_and_the_median_one_predicts():
    found = MeasuredSplit(FORMS, num_items=1000, cache_bytes=100_000, num_threads=1)
    for k in range(WARM_UP + LEAST):
        cold = 1 if k >= WARM_UP + LEAST - CHUNK else 2
        spent = PreparationTime(round(10 * k * MS), round((10 * k + 3) * MS), 2 * cold * MS, cold * MS, 100)
        found.add({"encoded": 100, "decoded": 500, "augmented": 300}, spent)
    sizes = {"encoded": 100, "decoded": 500, "stored": 100}
    rates = found.rates()
    quick = partition_cache(
        rates={**rates, "decode_augment_per_s": 1 / 0.003, "augment_per_s": 1 / 0.001}, sizes=sizes, n=1000,
        bytes=100_000, num_jobs=1, whole=True,
    )  # fmt: skip

    assert rates["decode_augment_per_s"] == pytest.approx(1 / 0.006)
    assert found.split(num_jobs=1, handover_items=0) == pytest.approx(quick.fractions)
    assert found.planned == repaced(quick, rates=rates, sizes=sizes)
    assert found.planned.examples_per_s < quick.examples_per_s


@given(
    forms=st.sampled_from([("decoded",), ("augmented",), FORMS, FORMS[:2], FORMS[1:], ("encoded", "augmented")]),
    num_jobs=st.integers(1, 5),
    handover_items=st.integers(0, 2000),
    cache=st.integers(0, 10**6),
    fetch_ms=st.floats(0, 9),
)
def test_shares_sum_to_one_and_only_jobs_that_share_hand_over(forms, num_jobs, handover_items, cache, fetch_ms):
    split = measured(forms, cache=cache, fetch_ms=fetch_ms).split(num_jobs=num_jobs, handover_items=handover_items)

    assert sum(split) == pytest.approx(1)
    assert all(share >= 0 for share in split)
    assert all(share == 0 for form, share in zip(FORMS, split, strict=True) if form not in forms)
    if len(forms) > 1:
        assert split[2] <= (MOST_HANDOVER if num_jobs > 1 else 0)


def test_a_small_dataset_is_measured_whole():
    found = MeasuredSplit(FORMS, num_items=3, cache_bytes=10_000, num_threads=1)
    for _ in range(3):
        assert not found.ready
        found.add({"encoded": 10, "decoded": 20, "augmented": 5}, PreparationTime(decode_ns=5))

    assert found.ready
    assert sum(found.split(num_jobs=2, handover_items=9)) == pytest.approx(1)
