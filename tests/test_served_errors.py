"""Errors and timeouts of a served loader are those of its dataset and of torch; mistakes are one clear error."""

import itertools
import os
import resource
import signal
import time

import pytest
import torch
from torch.utils.data import TensorDataset

from headway.core.errors import DamageError, FormatError, HeadwayError, InputError
from headway.data import DataLoader, DataServer, DataShareError, Pipeline, SyntheticJpeg
from headway.data.service import torch_links as links
from tests.launching import wait_for
from tests.served_made import Rows, end, ids, only, server_of
from tests.served_made import runtime as runtime


def test_another_dataset_is_not_served_and_both_are_named(runtime):
    list(DataLoader(Rows(), server=DataServer(path=str(runtime.parent / "s"))))
    other = DataLoader(Rows(size=41), server=str(runtime.parent / "s"))

    with pytest.raises(DataShareError, match=r"Rows\[41\].*Rows\[40\]"):
        list(other)
    end(runtime.parent / "s")


class Fails(Rows):
    def __getitem__(self, k):
        if k == 5:
            raise LookupError(f"row {k} is torn")
        return super().__getitem__(k)


def test_an_exception_of_the_dataset_comes_with_its_traceback_and_the_loop_may_go_on():
    iterator = iter(DataLoader(Fails(12), batch_size=4, server="auto"))
    next(iterator)

    with pytest.raises(LookupError, match=r"(?s)in the data server.*Traceback.*row 5 is torn"):
        next(iterator)
    assert next(iterator)["id"].tolist() == [8, 9, 10, 11]


class Raises(Rows):
    """Item 2 raises, or ends its reader."""

    def __init__(self, error):
        super().__init__(4)
        self.error = error

    def __getitem__(self, k):
        if k == 2:
            raise self.error
        return k


@pytest.mark.parametrize(
    ("error", "arrives"),
    [
        (FormatError("torn"), FormatError), (DamageError("torn"), DamageError), (KeyError("torn"), KeyError),
        (OSError(5, "torn"), OSError), (UnicodeDecodeError("utf-8", b"x", 0, 1, "torn"), RuntimeError),
        (StopIteration("torn"), RuntimeError), (SystemExit("torn"), RuntimeError),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)  # fmt: skip
def test_an_error_keeps_its_class_and_an_exit_ends_neither_server_nor_loop(error, arrives):
    iterator = iter(DataLoader(Raises(error), batch_size=1, server="auto"))
    next(iterator), next(iterator)

    with pytest.raises(arrives, match=rf"(?s)^Caught {type(error).__name__} in the data server.*torn") as caught:
        next(iterator)
    assert type(caught.value) is arrives
    assert [batch.tolist() for batch in iterator] == [[3]]


class Exits(Rows):
    def __getitem__(self, k):
        raise SystemExit(3)


def test_a_dataset_that_exits_at_its_first_example_is_served_to_its_end():
    with pytest.raises(RuntimeError, match="Caught SystemExit in the data server"):
        list(DataLoader(Exits(3), server="auto"))


class Holds(Rows):
    def __getitem__(self, k):
        return {"odd": object()}


def test_what_cannot_be_sent_is_named():
    with pytest.raises(InputError, match=r"\['odd'\] is of type object") as caught:
        list(DataLoader(Holds(), server="auto"))
    assert "RuntimeError" not in str(caught.value)


def test_a_pipelines_ragged_examples_are_the_error_that_they_are_without_a_server():
    pipeline = Pipeline(SyntheticJpeg(4, 48, 32)).decode().map(lambda image: image[: 8 + image[0, 0, 0] % 16])
    for options in ({}, {"server": "auto"}):
        with pytest.raises(InputError, match=r"example \d is uint8\[.*, the batch uint8\[.*pass a collate_fn"):
            list(pipeline.batch(4).loader(**options))


def test_a_timeout_is_torchs():
    loader = DataLoader(Rows(4, nap_s=0.3), batch_size=4, timeout=0.2, server="auto")

    with pytest.raises(RuntimeError, match=r"timed out after 0.2 seconds"):
        next(iter(loader))


def test_a_timeout_counts_while_the_server_looks_at_an_example_that_hangs(runtime):
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"^DataLoader timed out after 0.5 seconds$"):
        iter(DataLoader(Rows(4, nap_s=60), timeout=0.5, server="auto"))

    assert time.monotonic() - began < 30
    os.kill(server_of(only(runtime)), signal.SIGKILL)


@pytest.mark.slow
def test_a_server_whose_starter_did_not_wait_serves_the_next_caller(runtime):
    data = Rows(4, nap_s=0.2)
    with pytest.raises(RuntimeError, match="timed out"):
        iter(DataLoader(data, timeout=0.1, server="auto"))
    wait_for(lambda: list(runtime.glob("*.sock")), 30)  # it goes on to start
    pid = server_of(only(runtime))

    assert ids(DataLoader(data, server="auto")) == [0, 1, 2, 3]
    assert server_of(only(runtime)) == pid


def test_no_room_for_the_ring_is_one_clear_error():
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        loader = DataLoader(TensorDataset(torch.zeros(64, 100_000)), batch_size=32, server="auto")
        with pytest.raises(InputError, match=r"bytes of shared memory for .* slots are not to be had"):
            list(loader)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_ranks_without_a_name_in_common_are_told_to_give_one(monkeypatch):
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with pytest.raises(InputError, match=r"DataServer\(job='NAME'\)"):
        iter(DataLoader(Rows(), rank=0, world_size=2, server="auto"))


def test_ranks_of_a_torchrun_agree_on_a_name_and_the_next_run_has_another(monkeypatch):
    monkeypatch.setattr(links, "_number", itertools.repeat(0))
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    names = {}
    for run, rank in itertools.product("ab", (0, 1)):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", f"/tmp/torchelastic_{run}/none_x/attempt_0/{rank}/error.json")
        names[run, rank] = links._job_name(None, 2)

    assert names["a", 0] == names["a", 1] != names["b", 0] == names["b", 1]


def test_nobody_at_a_path_is_one_clear_error(runtime):
    with pytest.raises(HeadwayError, match="nobody listens"):
        iter(DataLoader(Rows(), server=str(runtime.parent / "none")))
