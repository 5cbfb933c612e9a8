"""The four rules of a protected region, under any order of stores, steps of a pass, flips, scrubs, crashes, closes.

A model says what must be: it knows nothing of bits and files, only which page holds what, which page was hashed when,
and what the parity was made of.
"""

import itertools
import math
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headway.storage.regions.dirty import works
from headway.storage.regions.file import RegionFile
from headway.storage.regions.layout import sidecar_of
from headway.storage.regions.pagemap import PAGE_BYTES as PAGE
from headway.storage.regions.protected import ProtectedRegion

PAGES, STRIPE = 11, 4
pages = st.integers(0, PAGES - 1)


class Region(RuleBasedStateMachine):
    """A region beside its model."""

    backend = "explicit"

    @initialize()
    def make(self) -> None:
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
        self.number = itertools.count(1)
        self.path = self.folder / "state-0"
        self.content = [bytes([page + 1]) * PAGE for page in range(PAGES)]
        self.path.write_bytes(b"".join(self.content))
        self.hashed = list(self.content)
        """What each page held when its checksum was computed."""
        self.mixed = [self.across(stripe) for stripe in range(-(-PAGES // STRIPE))]
        """What each stripe held when its parity was computed."""
        self.open()

    def open(self) -> None:
        self.region = ProtectedRegion(
            self.path, stripe=STRIPE, period_s=math.inf, backend=self.backend, durable=False
        )  # fmt: skip
        self.steps, self.step_of = None, ""
        self.written: set[int] = set()
        """Pages stored to since they were last made clean."""
        self.shadow: set[int] = set()
        """Pages that a pass has named and not settled."""

    def across(self, stripe: int) -> bytes:
        held = [np.frombuffer(page, np.uint8) for page in self.content[stripe * STRIPE : (stripe + 1) * STRIPE]]
        return np.bitwise_xor.reduce(held).tobytes()

    def put(self, page: int, at: int, data: bytes) -> None:
        old = self.content[page]
        self.content[page] = old[:at] + data + old[at + len(data) :]

    def on_disk(self) -> set[int]:
        file = RegionFile.__new__(RegionFile)
        geometry = self.region.geometry
        raw = np.fromfile(sidecar_of(self.path), np.uint8)[geometry.places()[0] :][: -(-PAGES // 8)]
        file._bitmap, file.geometry = raw, geometry
        return set(np.flatnonzero(file.shadow()).tolist())

    @rule(page=pages, at=st.integers(0, PAGE - 8), data=st.binary(min_size=1, max_size=8))
    def store(self, page: int, at: int, data: bytes) -> None:
        start = page * PAGE + at
        if self.backend == "explicit":
            self.region.write(start, data)
        else:
            self.region.buf[start : start + len(data)] = data
        self.put(page, at, data)
        self.written.add(page)

    @rule()
    def step(self) -> None:
        """Go on with the pass under way, or begin one."""
        self.steps = self.steps or self.region._steps()
        done = next(self.steps, None)
        if done is None:
            self.steps = None
            return
        name = done[0]
        if name == "noted":
            self.shadow |= self.written
        elif name == "claimed":
            self.shadow |= self.written
            self.written.clear()
        elif name == "hashed":
            for page in self.shadow:
                self.hashed[page] = self.content[page]
            for stripe in {page // STRIPE for page in self.shadow}:
                self.mixed[stripe] = self.across(stripe)
        else:
            assert name == "settled"
            self.shadow = set(self.written)
        # I2: whatever was made clean and is not settled stands on disk.
        assert self.on_disk() == self.shadow

    def whole_pass(self) -> None:
        self.step()
        while self.steps:
            self.step()

    @rule(page=pages, at=st.integers(0, PAGE - 1), bit=st.integers(0, 7))
    def flip(self, page: int, at: int, bit: int) -> None:
        """Change a bit behind everybody's back."""
        changed = bytes([self.content[page][at] ^ 1 << bit])
        with open(self.path, "r+b", buffering=0) as file:
            os.pwrite(file.fileno(), changed, page * PAGE + at)
        self.put(page, at, changed)

    @rule(repair=st.booleans())
    def scrub(self, repair: bool) -> None:
        """I3: a page is accused exactly if it is clean and not what was hashed; I4: rebuilt only from true parity."""
        dirty = self.written | self.shadow
        corrupt = [p for p in range(PAGES) if p not in dirty and self.content[p] != self.hashed[p]]
        lost = []
        for page in corrupt:
            mates = range(page // STRIPE * STRIPE, min((page // STRIPE + 1) * STRIPE, PAGES))
            true = np.bitwise_xor.reduce(
                [np.frombuffer(self.mixed[page // STRIPE], np.uint8)]
                + [np.frombuffer(self.content[mate], np.uint8) for mate in mates if mate != page]
            ).tobytes()
            alone = not dirty & set(mates) and sum(mate in corrupt for mate in mates) == 1
            if not (alone and true == self.hashed[page]):
                lost.append(page)
        report = self.region.scrub(repair=repair)

        assert report.corrupt.tolist() == corrupt
        assert report.unrepairable.tolist() == lost
        assert (report.skipped_pages, report.checked_pages) == (len(dirty), PAGES - len(dirty))
        assert not report.corrupt_sidecar.size
        if repair:
            assert report.repaired.tolist() == [page for page in corrupt if page not in lost]
            for page in report.repaired.tolist():
                self.content[page] = self.hashed[page]

    @rule()
    def vulnerable(self) -> None:
        stripes = {page // STRIPE for page in self.written | self.shadow}

        assert self.region.vulnerable() == sum(min(STRIPE, PAGES - stripe * STRIPE) for stripe in stripes)

    @rule()
    def crash(self) -> None:
        """Die as kill -9 does: what both files hold stays, and nothing else."""
        old, self.path = self.path, self.folder / f"state-{next(self.number)}"
        shutil.copy(old, self.path)
        shutil.copy(sidecar_of(old), sidecar_of(self.path))
        expected = [page for page in range(PAGES) if self.content[page] != self.hashed[page]]
        shadow = sorted(self.shadow)
        self.region._release()
        self.open()
        opened = self.region.opened

        assert not opened.clean
        assert opened.shadow.tolist() == shadow
        assert opened.unverified.tolist() == expected  # counted, and nothing put back: see `the_file_is_the_model`
        self.hashed = list(self.content)
        self.mixed = [self.across(stripe) for stripe in range(len(self.mixed))]

    @rule(flips=st.lists(st.tuples(pages, st.integers(0, PAGE - 1)), max_size=2))
    def close_and_open(self, flips: list[tuple[int, int]]) -> None:
        """Close; let the medium change something; open: every change is damage, none is adopted."""
        while self.steps:
            self.step()
        self.whole_pass()
        self.region.close()
        for page, at in flips:
            self.flip(page, at, 0)
        self.open()

        assert self.region.opened.clean

    @precondition(lambda self: self.steps is None)
    @rule()
    def quiesce(self) -> None:
        """After one pass nothing is dirty, and checksums and parity are those of what was hashed."""
        self.whole_pass()
        file = self.region._file

        assert not self.written | self.shadow
        assert not self.region.vulnerable()
        assert [bytes(parity) for parity in file.parity[:, 0]] == self.mixed

    @invariant()
    def the_file_is_the_model(self) -> None:
        """No rule but a repair changes what the file holds."""
        assert self.path.read_bytes() == b"".join(self.content)

    def teardown(self) -> None:
        if hasattr(self, "region"):
            self.region._release()
            shutil.rmtree(self.folder)


class Tracked(Region):
    """The same with dirty bits from the kernel."""

    backend = "pagemap_scan"


FEW = settings(max_examples=40, stateful_step_count=40)

TestExplicit = Region.TestCase
TestExplicit.settings = FEW
TestTracked = pytest.mark.skipif(bool(works("pagemap_scan")), reason="the kernel tracks no pages here")(
    Tracked.TestCase
)
TestTracked.settings = FEW
