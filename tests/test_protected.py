"""A protected region: racing writers, crashes, forks, bad input. Its laws are in test_protected_laws.py."""

import faulthandler
import hashlib
import math
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from headway.core.errors import BackgroundError, DamageError, HeadwayError, InputError
from headway.core.wire.pace import RateLimiter
from headway.storage.regions import dirty, protected
from headway.storage.regions.dirty import BACKENDS, works
from headway.storage.regions.layout import sidecar_of
from headway.storage.regions.pagemap import PAGE_BYTES
from headway.storage.regions.protected import ProtectedRegion

PAGE = PAGE_BYTES
here = [
    pytest.param(name, marks=pytest.mark.skipif(bool(works(name)), reason=f"{name} does not work here"))
    for name in BACKENDS
]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state"


def fresh(path, pages=16, **options) -> ProtectedRegion:
    return ProtectedRegion(path, num_bytes=pages * PAGE, **{"period_s": math.inf, **options})


def flip(path, page: int, byte: int = 50) -> None:
    """Change a bit of the file, not through the map: what a medium does."""
    with open(path, "r+b", buffering=0) as file:
        old = os.pread(file.fileno(), 1, page * PAGE + byte)
        os.pwrite(file.fileno(), bytes([old[0] ^ 4]), page * PAGE + byte)


@pytest.mark.parametrize("backend", here)
@pytest.mark.parametrize(("page", "parity"), [(PAGE, 1), (2 * PAGE, 1), (PAGE, 2)])
def test_after_a_pass_everything_matches_and_a_flip_is_found_and_repaired(path, backend, page, parity):
    content = np.random.default_rng(0).bytes(16 * PAGE)
    with fresh(path, page=page, parity=parity, backend=backend) as region:
        region.write(0, content)
        first, second = region.update(), region.update()

        assert (first.pages, first.stripes, first.again) == (16 * PAGE // page, 4 * PAGE // page, 0)
        assert second.pages == 0
    flip(path, 6)
    with fresh(path, page=page, parity=parity, backend=backend) as region:
        found = region.scrub()
        mended = region.repair()

        assert (found.status, found.corrupt.tolist()) == ("repairable", [6 * PAGE // page])
        assert (mended.status, mended.repaired.tolist()) == ("good", [6 * PAGE // page])
        assert bytes(region.buf) == content
        assert region.scrub().status == "good"


@pytest.mark.skipif(bool(works("pagemap_scan")), reason="the kernel tracks no pages here")
def test_a_million_racing_stores_raise_no_false_alarm_and_hide_no_flip(path):
    pages, hot = 512, 384  # stripes from 96 on are never written to
    source = os.memfd_create("bytes")
    os.write(source, os.urandom(8 * PAGE))
    with fresh(path, pages, period_s=0.01) as region:
        region.write(0, os.urandom(pages * PAGE))
        region.update()
        buf, halt, stores = region.buf, threading.Event(), []

        def slices(seed: int) -> None:  # a million single stores through the map
            rng = np.random.default_rng(seed)
            for at in rng.integers(0, hot * PAGE - 64, 500_000).tolist():
                buf[at : at + 64] = b"%064d" % at
            stores.append(500_000)

        def kernel() -> None:  # stores without the interpreter's lock: they run beside hashing
            rng, count = np.random.default_rng(9), 0
            while not halt.is_set() or count < 100_000:
                at, length = int(rng.integers(hot - 8)) * PAGE, int(rng.integers(1, 8 * PAGE))
                count += os.preadv(source, [buf[at : at + length]], 0) // 64
            stores.append(count)

        writers = [threading.Thread(target=slices, args=(1,)), threading.Thread(target=slices, args=(2,))]
        beside = threading.Thread(target=kernel)
        for writer in [*writers, beside]:
            writer.start()
        rng, rounds = np.random.default_rng(3), 0
        while any(writer.is_alive() for writer in writers) or rounds < 50:
            page = int(rng.integers(hot, pages))
            before = bytes(buf[page * PAGE : (page + 1) * PAGE])
            flip(path, page, int(rng.integers(PAGE)))
            report = region.repair()

            assert report.corrupt.tolist() == report.repaired.tolist() == [page]
            assert bytes(buf[page * PAGE : (page + 1) * PAGE]) == before
            rounds += 1
        halt.set()
        for writer in [*writers, beside]:
            writer.join()

        assert sum(stores) >= 1_000_000
        region.update()
        assert (region.scrub().status, region.scrub().skipped_pages) == ("good", 0)


KILLED = """
import os, sys, threading
from headway.storage.regions.protected import ProtectedRegion
region = ProtectedRegion(sys.argv[1], num_bytes=256 * 4096, period_s=0.001, backend=sys.argv[2])
print("open", flush=True)
number = 0
while True:
    number += 1
    at = number * 7919 % (256 * 4096 - 8)
    region.write(at, number.to_bytes(8, "little"))
    if number % 3000 == 0:
        print(number, flush=True)
"""


@pytest.mark.parametrize("backend", ["pagemap_scan", "explicit"])
def test_after_a_kill_nothing_is_repaired_from_stale_parity_and_all_matches_again(path, backend):
    if works(backend):
        pytest.skip(works(backend))
    for round_ in range(2):
        child = subprocess.Popen([sys.executable, "-c", KILLED, str(path), backend], stdout=subprocess.PIPE, text=True)
        try:
            for _ in range(round_ + 2):  # its own stores are the clock
                assert child.stdout.readline()
        finally:
            child.kill()
            child.communicate(timeout=30)
        before = hashlib.sha256(path.read_bytes()).digest()
        with fresh(path, 256, backend=backend) as region:
            assert not region.opened.clean
            assert hashlib.sha256(region.buf).digest() == before
            assert (region.scrub().status, region.scrub().skipped_pages) == ("good", 0)
        with fresh(path, 256, backend=backend) as region:
            assert region.opened.clean


def test_a_kill_between_parity_and_checksums_leaves_a_region_that_recovers(path, tmp_path):
    with fresh(path, 64, stripe=4) as region:
        region.write(0, os.urandom(64 * PAGE))
        region.update()
        region.write(8 * PAGE, os.urandom(24 * PAGE))
        steps = region._steps()
        assert [next(steps)[0] for _ in range(2)] == ["noted", "claimed"]
        torn, table = tmp_path / "torn", region._file.table.copy()
        region._file.refresh(np.arange(8, 32))
        region._file.table[3:6, 2:] = table[3:6, 2:]  # some entries of some rows came through, with new parity
        torn.write_bytes(path.read_bytes())
        sidecar_of(torn).write_bytes(sidecar_of(path).read_bytes())
        region._file.refresh(np.arange(8, 32))
        region._file.reguard(np.arange(16))
    before = torn.read_bytes()
    with ProtectedRegion(torn, period_s=math.inf) as region:
        assert region.opened.shadow.tolist() == list(range(8, 32))
        assert bytes(region.buf) == before
        assert (region.repair().status, region.scrub().status) == ("good", "good")
        assert not region.scrub().corrupt_sidecar.size
        assert bytes(region.buf) == before


WRITER = """
import mmap, random, sys
with open(sys.argv[1], "r+b") as file:
    memory = mmap.mmap(file.fileno(), 0)
random.seed(1)
for number in range(100_000):
    at = random.randrange(len(memory) // 2 - 8)
    memory[at : at + 8] = number.to_bytes(8, "little")
"""


def test_stores_of_another_process_raise_no_false_alarm_with_rehash(path):
    with fresh(path, 64, backend="rehash", period_s=0.005) as region:
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)])
        try:
            while writer.poll() is None:
                assert region.scrub().status == "good"
        finally:
            writer.kill()
            writer.wait(30)
        region.update()

        assert any(region.buf)
        assert (region.scrub().status, region.scrub().skipped_pages) == ("good", 0)


def test_the_background_keeps_up_and_close_leaves_everything_verified(path):
    with fresh(path, period_s=0.01) as region:
        passes = threading.Event()
        work = region._pass

        def counted():
            done = work()
            if done.pages:
                passes.set()
            return done

        region._pass = counted
        region.write(5, b"abc")

        assert passes.wait(30)
    with fresh(path) as region:
        assert region.opened.clean
        assert region.scrub().checked_pages == 16


def test_a_file_cut_while_it_is_open_surfaces_at_the_next_call(path):
    region = fresh(path, period_s=0.005)
    os.truncate(path, 3 * PAGE)
    region._thread.join(30)

    with pytest.raises(BackgroundError, match=r"somebody cut or extended it.*not kept up any more"):
        region.update()
    with pytest.raises(BackgroundError):
        region.close()
    region.close()
    with pytest.raises(DamageError, match="somebody cut or extended it"):
        ProtectedRegion(path)


def test_a_forked_child_may_read_and_a_store_of_its_own_ends_it(path):
    with fresh(path) as region:
        region.write(0, b"parent")
        region.update()
        kept, codes = region.buf, []
        for action in ("read", "store", "ask", "close"):
            pid = os.fork()
            if pid == 0:
                if action == "read":
                    os._exit(0 if bytes(kept[:6]) == bytes(region.buf[:6]) == b"parent" else 1)
                if action == "store":
                    faulthandler.disable()
                    kept[0] = 1
                if action == "ask":
                    try:
                        region.update()
                    except HeadwayError as refusal:
                        os._exit(7 if "belongs to process" in str(refusal) else 1)
                region.close()
                os._exit(9)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        report = region.scrub()

        assert codes == [0, -signal.SIGSEGV, 7, 9]
        assert (report.status, report.skipped_pages) == ("good", 0)
        del kept


def test_a_region_is_free_again_when_its_process_died_although_a_child_lives(path):
    code = (
        "import os, sys; from headway.storage.regions.protected import ProtectedRegion\n"
        "region = ProtectedRegion(sys.argv[1], num_bytes=65536)\n"
        "if os.fork() == 0:\n    print('forked', flush=True); sys.stdin.read(); os._exit(0)\n"
        "os.kill(os.getpid(), 9)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout.readline() == "forked\n"
        child.wait(30)
        with ProtectedRegion(path) as region:
            assert not region.opened.clean
    finally:
        child.communicate(timeout=30)  # the end of its input ends the child's child


def test_arrays_that_outlive_the_region_can_be_read(path):
    with fresh(path) as region:
        array = np.frombuffer(region.buf, np.uint8)
        array[0] = 7
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()
        array[1] = 7
        os._exit(0)

    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGSEGV
    assert array[0] == 7
    with pytest.raises(InputError, match="is closed; open it again"):
        region.update()
    with fresh(path) as again:
        assert again.scrub().status == "good"


def test_close_waits_for_writers_to_stop(path):
    region = fresh(path, backend="explicit")
    with region.writing(0, 1), pytest.raises(InputError, match=r"still being written to.*close\(\) again"):
        region.close()
    region.close()

    assert fresh(path, backend="explicit").opened.clean


def test_with_rehash_all_pages_count_as_vulnerable_and_damage_is_found_after_opening(path):
    with fresh(path, backend="rehash") as region:
        region.write(0, os.urandom(16 * PAGE))
    flip(path, 2)
    with fresh(path, backend="rehash") as region:
        assert region.vulnerable() == 16
        assert region.repair().repaired.tolist() == [2]


def test_a_failure_while_opening_leaves_the_region_free(path, monkeypatch):
    monkeypatch.setattr(dirty, "self_test", lambda: {"file": "PAGEMAP_SCAN: not here"})
    with pytest.raises(InputError, match=rf"Linux {os.uname().release}"):
        fresh(path, backend="pagemap_scan")
    with fresh(path) as region:
        assert region.opened.clean
        assert region.backend == "rehash"


def test_a_scrub_keeps_to_its_rate(path, monkeypatch):
    slept = []
    monkeypatch.setattr(protected, "RateLimiter", lambda rate: RateLimiter(rate, clock=lambda: 0.0, sleep=slept.append))
    with fresh(path, 1024) as region:
        region.scrub(rate_mb_s=2.0)

        assert slept[-1] == pytest.approx(1024 * PAGE / 2e6)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"period_s": 0}, "period_s is 0"), ({"period_s": -1.0}, "period_s is -1.0"),
        ({"period_s": math.nan}, "period_s is nan"), ({"page": 1000}, "page is 1000"), ({"stripe": 0}, "stripe is 0"),
        ({"parity": 0}, "parity 0"), ({"backend": "soft_dirty"}, "unknown back-end 'soft_dirty'"),
    ],
)  # fmt: skip
def test_arguments_that_cannot_work_are_refused(path, options, match):
    with pytest.raises(InputError, match=match):
        fresh(path, **options)


def test_a_rate_that_is_none_is_refused(path):
    with fresh(path) as region, pytest.raises(InputError, match="rate_mb_s is 0"):
        region.scrub(rate_mb_s=0)


def test_files_that_do_not_fit_what_was_asked_for_are_named(path):
    with pytest.raises(InputError, match=r"does not exist\. Pass num_bytes"):
        ProtectedRegion(path)
    path.write_bytes(b"x" * 100)
    with pytest.raises(InputError, match="100 bytes are not whole pages"):
        ProtectedRegion(path)
    with pytest.raises(InputError, match="has 100 bytes, not num_bytes=65536"):
        fresh(path)
    path.unlink()
    fresh(path).close()
    with pytest.raises(InputError, match="was made with page=4096, stripe=4, parity=1, num_bytes=65536"):
        fresh(path, stripe=8)
    with fresh(path), pytest.raises(InputError, match="is open as a protected region already"):
        fresh(path)
    path.unlink()
    with pytest.raises(DamageError, match="is missing, but its sidecar is there"):
        fresh(path)
