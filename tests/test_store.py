"""A folder as a store."""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.storage.stores import LocalStore
from tests.checkpoints import unsynced
from tests.spawn import run_threads


@pytest.fixture(autouse=True)
def quick():
    with unsynced():
        yield


@pytest.fixture
def store(tmp_path) -> LocalStore:
    return LocalStore(tmp_path / "s")


@settings(max_examples=30)
@given(data=st.binary(max_size=200), start=st.integers(0, 250), length=st.integers(0, 250))
def test_a_range_is_what_slicing_gives(tmp_path_factory, data, start, length):
    store = LocalStore(tmp_path_factory.getbasetemp() / "ranges")
    store.put("a", [data])

    assert bytes(store.read("a", start, start + length)) == data[start : start + length]
    assert bytes(store.read("a")) == data


def test_put_replaces_and_lists_with_sizes(store):
    store.put("x/y/z.bin", [b"1", b"22"])
    store.put("x/a.bin", [b""])
    store.put("x/y/z.bin", [b"4444"])

    assert store.list() == {"x/a.bin": 0, "x/y/z.bin": 4}
    assert store.list("x/y") == {"x/y/z.bin": 4}
    assert store.list("nothing") == {}


def test_of_many_that_want_an_absent_name_one_gets_it_whole(store):
    gate, won = threading.Barrier(8), []

    def want(number: int) -> None:
        gate.wait()
        if store.put_if_absent("c/commit.json", bytes([number]) * 100):
            won.append(number)

    run_threads(want, [(number,) for number in range(8)])

    assert len(won) == 1
    assert bytes(store.read("c/commit.json")) == bytes(won) * 100
    assert list(store.list()) == ["c/commit.json"]


def test_what_was_read_stays_after_the_name_is_gone(store):
    store.put("a", [b"headway"])
    view = store.read("a")
    store.remove("a")

    assert bytes(view) == b"headway"
    with pytest.raises(FileNotFoundError):
        store.read("a")


def test_a_folder_is_removed_with_all_in_it_and_nothing_is_fine(store):
    store.put("a/b", [b"1"])
    store.put("ab", [b"2"])
    store.remove("a")
    store.remove("a")

    assert list(store.list()) == ["ab"]


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a/../../x"])
def test_names_that_lead_out_are_refused(store, name):
    with pytest.raises(InputError, match="leads out of"):
        store.read(name)


def test_what_has_a_folder_in_its_place_or_a_file_in_its_folders_place_is_not_there(store):
    store.put("a/b", [b"1"])

    for name in ("a", "a/b/c"):
        with pytest.raises(FileNotFoundError):
            store.read(name)
