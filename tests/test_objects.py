"""A bucket as a store, and checkpoints in it: a real S3 server, spoken to by obstore only."""

import os
import random
import threading

import pytest

pytest.importorskip("obstore", reason="object stores need the extra `s3`")
pytest.importorskip("moto.server", reason="the S3 server of these tests is moto: pip install 'moto[s3]' flask")

from headway.checkpoint.layout.stored import BucketFiles
from headway.core.errors import DamageError, HeadwayError, InputError
from headway.storage.checks.verification import verify_store
from headway.storage.commit import StepTakenError
from headway.storage.draft import ObjectDraft, abandon
from headway.storage.object_commit import commit, committed, record_at, recover, remove
from headway.storage.stores import PART_BYTES, LocalStore, ObjectStore, claim, open_store, url_of
from tests import bucket_saves
from tests.bucket_saves import save
from tests.object_race import points, race
from tests.refusals import refused

environment, root = bucket_saves.environment, bucket_saves.root


def test_a_bucket_does_what_a_folder_does(root, tmp_path):
    """The same random calls to both; a dict is what they should come to."""
    rng, stores, oracle = random.Random(3), (open_store(root), LocalStore(tmp_path)), {}
    names = ["a", "ab", "b/a", "b/c/d", "bc/d"]
    for _ in range(60):
        name, data = rng.choice(names), rng.randbytes(rng.randrange(40))
        act = rng.choice(["put", "put_if_absent", "read", "list", "remove"])
        if act == "put":
            for store in stores:
                store.put(name, [data[:3], data[3:]])
            oracle[name] = data
        elif act == "put_if_absent":
            assert {store.put_if_absent(name, data) for store in stores} == {name not in oracle}
            oracle.setdefault(name, data)
        elif act == "read" and name in oracle:
            start, stop = rng.randrange(30), rng.choice([None, rng.randrange(50)])
            assert {bytes(store.read(name, start, stop)) for store in stores} == {oracle[name][start:stop]}
        elif act == "read":
            for store in stores:
                with pytest.raises(FileNotFoundError):
                    store.read(name)
        elif act == "remove":
            for store in stores:
                store.remove(name)
            oracle.pop(name, None)
        found = {key: len(value) for key, value in oracle.items()}
        below = {key: size for key, size in found.items() if key.startswith("b/")}
        for store in stores:
            assert store.list() == found
            assert store.list("b") == below
    assert list(open_store(root).list()) == sorted(oracle)


def test_a_large_object_goes_up_in_parts_and_comes_down_by_ranges(root):
    store, data = open_store(root), random.Random(0).randbytes(2 * PART_BYTES + 12345)

    store.put("image", (data[start : start + 1_000_003] for start in range(0, len(data), 1_000_003)))

    assert bytes(store.read("image")) == data
    assert bytes(store.read("image", PART_BYTES - 7, PART_BYTES + 9)) == data[PART_BYTES - 7 : PART_BYTES + 9]
    assert bytes(store.read("image", len(data) - 5, len(data) + 5)) == data[-5:]
    assert "-" in store.tag("image"), "S3's tag of a multipart upload"


def test_an_upload_that_breaks_off_leaves_nothing(root):
    def parts():
        yield bytes(2 * PART_BYTES)
        raise OSError("the disk under it")

    with pytest.raises(Exception, match="disk under it"):
        open_store(root).put("image", parts())

    assert open_store(root).list() == {}


def test_of_many_writers_one_puts_what_was_absent(root):
    won = []
    stores = [open_store(root) for _ in range(6)]
    threads = [
        threading.Thread(target=lambda s=store, n=number: won.append(s.put_if_absent("x", b"%d" % n)))
        for number, store in enumerate(stores)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(won) == [False] * 5 + [True]
    assert stores[0].put_if_absent("x", bytes(stores[0].read("x"))), "a put that was tried again after all"


def test_a_process_forked_from_one_that_used_a_store_is_told(root, monkeypatch):
    open_store(root).list()
    monkeypatch.setattr(claim, "__defaults__", ([os.getppid()],))

    with pytest.raises(InputError, match="had read from an object store before it forked this one"):
        open_store(root)


def test_a_swap_is_done_only_while_the_old_one_is_there(root):
    store = open_store(root)
    store.put("x", [b"one"])
    tag = store.tag("x")

    assert store.put_if_same("x", b"two", tag)
    assert not store.put_if_same("x", b"three", tag)
    assert bytes(store.read("x")) == b"two"


def test_what_a_user_can_mend_is_said(root, monkeypatch):
    with pytest.raises(InputError, match="no such bucket"):
        open_store("s3://nowhere/run").list()
    with pytest.raises(InputError, match="no such bucket"):
        open_store("s3://nowhere/run").put("x", [b"1"])
    with pytest.raises(InputError, match="no URL of a store"):
        url_of("ftp://bucket/run")
    monkeypatch.setenv("AWS_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HeadwayError, match="cannot be reached"):
        ObjectStore(root, retry_config={"max_retries": 0}).list()


def test_a_reader_that_goes_on_asks_less_often_and_gets_the_same_bytes(root):
    store, data, asked = open_store(root), random.Random(1).randbytes(400_000), []

    class Counted:
        place = store.place

        def list(self, prefix=""):
            return store.list(prefix)

        def read(self, name, start=0, stop=None):
            asked.append(stop - start)
            return store.read(name, start, stop)

    store.put("a", [data])
    files, window = BucketFiles(Counted()), 4096
    found = b"".join(
        bytes(files.span("a", at, min(at + window, len(data)), bytearray)) for at in range(0, len(data), window)
    )

    assert found == data
    assert sum(asked) == len(data), "nothing was read twice, or beyond the end"
    assert len(asked) <= 10
    assert bytes(files.span("a", 100, 200, bytearray)) == data[100:200]
    assert asked[-1] == 100
    with pytest.raises(DamageError, match="missing"):
        files.span("b", 0, 1, bytearray)
    with pytest.raises(DamageError, match="ends at byte 400000"):
        files.span("a", 399_990, 400_010, bytearray)


def test_only_what_has_a_commit_record_is_listed(root):
    store, draft = save(root, 3, "a")
    save(root, 4, "a", ranks=1)

    assert committed(store) == []
    with pytest.raises(HeadwayError, match=r"step 4 is not committed: rank 1 has not finished"):
        commit(store, ObjectDraft(root, 4, "a"), world_size=2)
    record = commit(store, draft, world_size=2)
    assert commit(store, draft, world_size=2) == record, "asked again"
    assert [(one.step, one.path) for one in committed(store)] == [(3, f"{root}/step-3.a")]
    assert verify_store(open_store(committed(store)[0].path)).status == "good"


def test_a_step_is_committed_once_unless_the_old_attempt_was_given_up(root):
    store, first = save(root, 3, "a")
    standing = commit(store, first, world_size=2)
    _, second = save(root, 3, "b")

    with pytest.raises(StepTakenError, match="committed already by attempt a"):
        commit(store, second, world_size=2)
    assert record_at(store, 3) == standing
    assert commit(store, second, world_size=2, replaces=standing).attempt == "b"
    assert [one.record.attempt for one in committed(store)] == ["b"]
    assert not store.list("step-3.a")


def test_garbage_of_dead_attempts_goes_and_what_is_committed_or_young_stays(root):
    store, draft = save(root, 3, "a")
    commit(store, draft, world_size=2)
    save(root, 4, "dead", ranks=1)
    store.put("notes/step-9.txt", [b"mine"])

    assert recover(store) == [], "an hour has not passed"
    assert recover(store, older_s=-1.0) == ["step-4.dead"]
    assert store.folders() == ("notes", "step-3", "step-3.a")
    _, other = save(root, 5, "c")
    abandon(other, store)
    remove(store, committed(store)[0])
    assert list(store.list()) == ["notes/step-9.txt"]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3))
def test_of_two_writers_that_may_die_anywhere_one_commit_is_visible_and_it_is_whole(root, environment, number):
    dies_before = [(1 << 30, 1 << 30), (13, 1 << 30), points(random.Random(number))][number]

    outcome = race(root, environment, dies_before)

    assert outcome.is_right, outcome


test_an_attempt_that_cannot_be_part_of_a_key_is_refused = refused(
    (lambda: ObjectDraft("s3://bucket/run", 1, "a/b"), "cannot be part of a key"),
    (lambda: ObjectDraft("s3://bucket/run", -1, "a"), "step is -1"),
)


def test_a_prefix_of_a_folder_is_removed_with_all_below_it_and_again_without_complaint(tmp_path):
    store = open_store(f"file://{tmp_path}")
    for name in ("step-1/a", "step-1/deep/b", "step-10/a", "lone"):
        store.put(name, [b"x"])

    for prefix in ("step-1", "step-1", "lone", "never"):
        store.remove(prefix)

    assert list(store.list("")) == ["step-10/a"]
