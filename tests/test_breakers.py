"""Scripts written to break remedies: some of benchmarks/breakers, through the benchmark's own runner."""

import logging
import logging.handlers
import sys
import time

import pytest

from benchmarks import breakers
from headway.catalog import REMEDIES
from headway.host.handlers import files, later
from headway.runtime.in_rank.state_account import before_looks
from tests.remedy_context import TestContext

EXPECTED = {
    ("log_handler_exits", "host.logging"): "refused",
    ("log_file_read_back", "host.logging"): "equal",
    ("save_then_exists", "checkpoint.async"): "equal",
    ("gc_threshold_zero", "host.gc"): "refused",
    ("plain_rows", "data.workers"): "equal",
    ("file_rewritten", "data.workers"): "equal",
    ("long_list_edited", "data.workers"): "equal",
    ("sqlite_rows", "data.workers"): "refused",
    ("own_batch_sampler", "data.threads"): "refused",
}
"""Script, remedy -> what must come of it, besides equal digits."""

APPROXIMATE = {
    "cluster.batch", "cluster.fork", "comm.compress", "comm.loose", "comm.overlap", "compute.autocast",
    "compute.channels_last", "compute.compile", "compute.cudnn_benchmark", "compute.fused_optimizer", "compute.tf32",
    "fault.guard", "model.precision", "model.tune",
}  # fmt: skip
"""Remedies that change digits where they are granted: no script's digits can be held against them."""


def came_of(script, remedy):
    """Run one script plain and under one remedy; return outcome and detail."""
    (row,) = breakers.attack(breakers.breakers()[script], [remedy])
    return row.outcome, row.detail


@pytest.mark.slow
@pytest.mark.parametrize("case", EXPECTED, ids=str)
def test_a_script_that_attacks_a_remedy_keeps_its_digits_or_refuses_the_remedy(case):
    outcome, detail = came_of(*case)

    assert outcome == EXPECTED[case], detail


def test_every_breaker_says_what_it_attacks_and_every_remedy_is_attacked():
    known = breakers.breakers()

    kept = set(REMEDIES) - APPROXIMATE
    assert {remedy for breaker in known.values() for remedy in breaker.remedies} == kept
    assert set(breakers.FORCED) == kept
    assert len({breaker.attacks for breaker in known.values()}) == len(known) >= 70
    assert set(breakers.DEFAULT) <= set(known)


class Shipping(logging.Handler):
    """Writes to a file of its own, slowly."""

    def __init__(self, path):
        super().__init__()
        self.file, self.latency_s = open(path, "a"), 0.01  # noqa: SIM115 - open as long as the handler

    def emit(self, record):
        time.sleep(self.latency_s)
        self.file.write(self.format(record) + "\n")


class Counting(logging.Handler):
    count = 0

    def emit(self, record):
        self.count += 1


class Raising(logging.Handler):
    def emit(self, record):
        raise OSError("full")


class Ending(logging.Handler):
    def emit(self, record):
        sys.exit(1)


class Keeping(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record)


def test_a_handler_is_called_later_only_if_nobody_can_tell(tmp_path):
    shipping, plain = Shipping(tmp_path / "a"), logging.FileHandler(tmp_path / "b")

    assert later(shipping) is later(plain) is None
    assert list(files(shipping)) == [str(tmp_path / "a")]
    assert str(tmp_path / "b") in files(plain)
    for handler, reason in [
        (Counting(), "changes count"), (Raising(), "raises"), (Ending(), "uses sys"), (Keeping(), "keeps lines"),
        (logging.StreamHandler(sys.stdout), "a stream that it shares"),
        (logging.handlers.MemoryHandler(7), "hands records"), (logging.handlers.QueueHandler([]), "hands records"),
    ]:  # fmt: skip
        assert reason in later(handler)
    plain.addFilter(lambda record: print(record) is None)
    assert later(plain) is not None


def test_looks_at_files_are_announced_until_undone(tmp_path):
    seen, context = [], TestContext()
    before_looks(context, seen.append)
    try:
        (tmp_path / "a").write_text("1")
        assert (tmp_path / "a").exists()
    finally:
        for undo in reversed(context.undos):
            undo()
    (tmp_path / "b").write_text("2")

    assert tmp_path / "a" in [*seen]
    assert tmp_path / "b" not in [*seen]
