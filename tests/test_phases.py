"""The three measured phases of DS-Analyzer, on datasets whose cost is known."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from headway.core.errors import InputError
from headway.data.runtime.phases import forget, measure


class Costly(Dataset[torch.Tensor]):
    """Examples that take 3 ms to read the first time, and 1 ms to prepare each time."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.read: set[int] = set()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        if index not in self.read:
            time.sleep(0.003)
            self.read.add(index)
        time.sleep(0.001)
        return torch.full((2,), float(index))


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(10))


def test_the_phases_tell_fetch_from_prep_and_compute() -> None:
    """Per batch of 4: 12 ms of fetch, 4 ms of prep, 2 ms of compute. Sleeps only get longer, never shorter."""
    dataset = Costly(80)
    report = measure(DataLoader(dataset, 4, shuffle=True), lambda batch: time.sleep(0.002), num_steps=20)

    assert report.bottleneck == "fetch"
    assert report.fetch_s / report.prep_s == pytest.approx(3, rel=0.5)
    assert report.prep_s / report.compute_s == pytest.approx(2, rel=0.5)
    assert report.flags == ()


def test_each_phase_reads_the_same_examples_and_cold_comes_first() -> None:
    dataset, seen, cold = Costly(40), [], []
    measure(
        DataLoader(dataset, 4, shuffle=True),
        lambda batch: seen.append(batch[:, 0].tolist()),
        num_steps=8,
        make_cold=lambda: cold.append(len(seen)),
    )

    assert cold == [0]
    assert seen[:8] == seen[8:16]
    assert seen[16:] == [seen[0]] * 8


def test_the_device_is_synchronised_at_the_end_of_each_step() -> None:
    count = []
    measure(DataLoader(Costly(32), 4), lambda batch: None, num_steps=8, synchronize=lambda: count.append(1))

    assert len(count) == 24


def test_files_are_dropped_from_the_page_cache_without_harm(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"x" * 8192)
    forget([path])

    assert path.read_bytes() == b"x" * 8192


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (DataLoader(Endless(), 2), r"IterableDataset.*map-style"),
        (DataLoader(Costly(3), 4), r"3 examples, fewer than one batch of 4"),
        (DataLoader(Costly(16), 4), r"4 steps can be timed, of which 5 are warm-up"),
    ],
)
def test_what_cannot_be_measured_is_refused(loader: DataLoader[Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        measure(loader, lambda batch: None)
