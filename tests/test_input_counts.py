"""Counts in words: rates of what has a whole, bytes as bytes, nothing of what is nothing; they are in a run's facts."""

import pytest
import torch
from torch.utils.data import TensorDataset

from headway.data import DataLoader
from headway.data.bytes import account
from headway.ledger.answers.ledger import count_words
from headway.trace.recording.runs import Run
from tests.recorded import recording


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"hits": 3, "misses": 1}, "75 % of 4 reads hit"),
        ({"hits": 0, "misses": 4}, "0 % of 4 reads hit"),
        ({"substituted": 1, "items": 8}, "12 % of 8 examples substituted"),
        ({"bytes": 1024**2, "refused": 0}, "1.0 MB"),
        ({"storage_bytes": 2048, "refused": 7}, "2.0 KB, 7 refused"),
        ({"items": 5}, "5 items"),
    ],
)
def test_a_number_is_said_as_what_it_is(numbers, words):
    assert count_words({"cache": numbers}) == [f"cache: {words}"]


def test_what_counted_nothing_is_not_said():
    assert count_words({"cache": {"hits": 0, "misses": 0}, "order": {"skipped": 0}}) == []


def test_the_cache_of_a_recorded_loader_is_in_the_facts_of_its_run(tmp_path):
    with recording(tmp_path):
        loader = DataLoader(TensorDataset(torch.arange(40)), 4, cache_bytes=10**6)
        for _ in range(2):
            for _ in loader:
                pass
        account.counted("examples", skipped=2)
    counts = Run.open(tmp_path).facts.input

    assert (counts["cache.loader"]["hits"], counts["cache.loader"]["misses"]) == (40, 40)
    assert "examples: 2 skipped" in count_words(counts)
