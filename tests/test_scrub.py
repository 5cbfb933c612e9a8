"""Scrubbing: all checkpoints, the longest unverified first, at a bounded rate."""

import pytest
import torch

from headway.core.errors import InputError
from headway.core.wire.pace import RateLimiter
from headway.storage.checks import verification
from headway.storage.checks.verification import NOTES, order, scrub, verified
from headway.storage.commit import committed, remove
from tests.checkpoints import unsynced, write_checkpoint


@pytest.fixture(autouse=True)
def quick():
    with unsynced():
        yield


@pytest.fixture
def root(tmp_path):
    for step in (1, 2, 3):
        write_checkpoint(tmp_path, step, {"w": torch.randn(8, 8)}, world_size=1)
    return tmp_path


def test_every_checkpoint_is_verified_and_the_oldest_look_comes_first(root):
    clock = iter(range(100, 200))

    assert [report.status for report in scrub(root, now=lambda: float(next(clock)))] == ["good"] * 3
    assert {name: entry.unix_s for name, entry in verified(root).items()} == {
        "step-1": 100.0, "step-2": 101.0, "step-3": 102.0,
    }  # fmt: skip
    write_checkpoint(root, 4, {"w": torch.zeros(3)}, world_size=1)
    assert [one.step for one in order(root)] == [4, 1, 2, 3]


def test_a_scrub_that_was_interrupted_goes_on_where_it_was(root):
    seen = []

    def stop(report) -> None:
        seen.append(report.path)
        if len(seen) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scrub(root, tell=stop)

    assert [one.step for one in order(root)] == [3, 1, 2]


def test_damage_is_reported_and_noted(root):
    image = root / "step-2" / "rank-0" / "__0_0.distcp"
    image.write_bytes(image.read_bytes()[:-1] + b"?")

    reports = {report.path[-1]: report.status for report in scrub(root)}

    assert reports == {"1": "good", "2": "lost", "3": "good"}
    assert verified(root)["step-2"].status == "lost"


def test_the_reading_is_held_to_its_rate(root, monkeypatch):
    slept = []
    monkeypatch.setattr(
        verification, "RateLimiter", lambda rate: RateLimiter(rate, clock=lambda: 0.0, sleep=slept.append)
    )

    reports = scrub(root, bytes_per_s=1000.0)

    whole = [sum(entry.stat().st_size for entry in one.path.rglob("*") if entry.is_file()) for one in committed(root)]
    assert sum(report.checked_bytes for report in reports) == sum(whole)
    assert max(slept) == pytest.approx(max(whole) / 1000.0, rel=0.5)


def test_a_checkpoint_that_is_removed_meanwhile_is_left_out(root):
    def take_away(report) -> None:
        for one in committed(root)[1:]:
            remove(one)

    reports = scrub(root, tell=take_away)

    assert [report.path[-1] for report in reports] == ["1"]
    assert set(verified(root)) == {"step-1"}


def test_notes_that_cannot_be_read_count_as_none(root):
    (root / NOTES).write_text("{broken")

    assert verified(root) == {}
    assert len(scrub(root)) == 3
    with pytest.raises(InputError, match="is no folder"):
        scrub(root / "nowhere")
