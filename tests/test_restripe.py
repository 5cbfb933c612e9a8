"""Another scheme of parity: data files untouched, IO under a cap, one of the two schemes whole at any point."""

import json
import os
from collections import Counter

import pytest

from headway.core.errors import DamageError, InputError
from headway.storage.checks.repair import repair
from headway.storage.checks.verification import verify
from headway.storage.redundancy.parity import check, state
from headway.storage.redundancy.restripe import restripe
from tests import redundant
from tests.launching import json_of
from tests.redundant import content, flip, lose, protected, put_back

no_fsync, copy = redundant.no_fsync, redundant.copy


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Ten ranks under 4+2."""
    return protected(tmp_path_factory.mktemp("root"), "4+2", world_size=10, rows=4000)


def facts_of_data(path):
    """Inode, change and size of every file of the commit."""
    files = [file for file in path.rglob("*") if file.is_file()]
    files = [file for file in files if "parity" not in file.name and "copies" not in file.parts]
    return {str(file): (file.stat().st_ino, file.stat().st_mtime_ns, file.stat().st_size) for file in files}


class Clock:
    """Time that passes only in sleep."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds


@pytest.mark.parametrize("to", ["8+2", "4+3", "2+1", "10+4"])
def test_the_new_parity_is_what_encoding_anew_would_make(copy, tmp_path, to):
    before = facts_of_data(copy)

    done = restripe(copy, to)

    assert (done.before, done.after) == ("4+2", to)
    assert facts_of_data(copy) == before
    assert (verify(copy).status, state(copy).scheme, state(copy).status) == ("good", to, "redundant")
    fresh = content(protected(tmp_path / "fresh", to, world_size=10, rows=4000))
    mine = content(copy)
    assert {name: data for name, data in mine.items() if "parity" in name} == {
        name: data for name, data in fresh.items() if "parity" in name
    }


def test_data_are_read_once_and_only_new_parity_is_written(copy):
    """Type 2 of PACEMAKER: capacity (k / n of it data) times 1 + m' / k'."""
    data = 10 * 8 * json.loads((copy / "rank-0/parity.json").read_text().rsplit(",", 1)[0] + "}")["segment_bytes"] // 2

    done = restripe(copy, "8+2")

    assert done.written_bytes == done.read_bytes * 2 // 8
    assert 0 <= done.read_bytes - data <= 10 * 8 * 4096


def test_reads_and_writes_stay_under_the_cap_in_every_second(copy):
    clock, cap = Clock(), 150_000.0
    moved: Counter[int] = Counter()
    last = [0.0]

    def sleep(seconds):
        clock.sleep(seconds)
        moved[int(clock.now_s - 1e-9)] += round((clock.now_s - last[0]) * cap)
        last[0] = clock.now_s

    done = restripe(copy, "8+2", cap_bytes_per_s=cap, clock=clock, sleep=sleep)

    total = done.read_bytes + done.written_bytes
    assert sum(moved.values()) == pytest.approx(total, rel=1e-3)
    assert clock.now_s == pytest.approx(total / cap, rel=0.01)
    assert len(moved) > 5
    assert all(0.8 * cap <= count <= 1.2 * cap for second, count in moved.items() if second < int(clock.now_s))


def test_after_it_as_many_directories_may_be_lost_as_the_new_scheme_says(copy):
    restripe(copy, "4+3")
    good = content(copy)
    lose(copy, 0, 4, 9)

    assert repair(copy).status == "repaired"
    assert content(copy) == good


def test_stopped_at_any_point_one_scheme_is_whole_and_the_next_call_goes_on(tmp_path, monkeypatch):
    path = protected(tmp_path, "1+1", world_size=2, rows=60)
    start = content(path)
    restripe(path, "1+2")
    end = content(path)

    class StoppedError(Exception):
        pass

    def stopping(left, real):
        def stop(*arguments, **options):
            if not left[0]:
                raise StoppedError
            left[0] -= 1
            return real(*arguments, **options)

        return stop

    steps = 0
    while True:
        put_back(path, start)
        left = [steps]
        with monkeypatch.context() as patch:
            for name in ("replace", "unlink", "truncate"):
                patch.setattr(os, name, stopping(left, getattr(os, name)))
            try:
                restripe(path, "1+2")
            except StoppedError:
                pass
            else:
                break
        assert all("parity" in hurt.file for hurt in verify(path).damaged)
        middle = content(path)
        lose(path, 1)
        assert verify(path).status == "repairable", steps
        put_back(path, middle)
        if steps % 3 == 0:
            restripe(path, "1+2")
            assert content(path) == end
        steps += 1

    assert steps > 20
    assert content(path) == end


def test_parity_can_be_added_to_a_checkpoint_that_was_saved_without(tmp_path):
    path = protected(tmp_path, "none", world_size=3, rows=600)
    restripe(path, "2+1")
    good = content(path)
    lose(path, 1)

    assert (repair(path).status, check(path)) == ("repaired", [])
    assert {name: data for name, data in content(path).items() if name in good} == good


def test_doing_it_twice_reads_nothing(copy):
    restripe(copy, "8+2")
    before = content(copy)

    again = restripe(copy, "8+2")

    assert (again.before, again.read_bytes, again.written_bytes) == ("8+2", 0, 0)
    assert content(copy) == before


def test_damaged_data_are_told_and_the_old_parity_stays(copy):
    flip(copy, "rank-3/__3_0.distcp", 9000)
    parity = {name: data for name, data in content(copy).items() if "parity" in name}

    with pytest.raises(DamageError, match=r"rank-3/__3_0\.distcp is damaged.*ckpt repair"):
        restripe(copy, "8+2")

    assert {name: data for name, data in content(copy).items() if "parity" in name and "draft" not in name} == parity
    assert repair(copy).status == "repaired"


def test_the_command_takes_all_checkpoints_of_a_run(tmp_path):
    for step in (1, 2):
        protected(tmp_path, "xor", world_size=3, rows=300, step=step)
    answer = json_of("storage", "restripe", str(tmp_path), "--to", "2+2", "--cap-mb-s", "500", "--json")

    assert answer["schema"] == "headway.storage.redundancy.restripe/1"
    assert [(row["before"], row["after"]) for row in answer["checkpoints"]] == [("2+1", "2+2")] * 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda path: restripe(path, "none"), "cannot become 'none'. Name a scheme with parity"),
        (lambda path: restripe(path, "8:2"), "'8:2' is none. Write none"),
        (lambda path: restripe(path, "8+2", cap_bytes_per_s=-1.0), "rate of -1.0"),
    ],
)
def test_bad_input_is_told(copy, call, message):
    with pytest.raises(InputError, match=message):
        call(copy)


def test_a_lost_directory_is_repaired_before_parity_is_replaced(copy):
    lose(copy, 3)
    before = content(copy)

    with pytest.raises(DamageError, match=r"lost the directory of rank 3\. Run first: headway ckpt repair"):
        restripe(copy, "8+2")

    assert content(copy) == before
