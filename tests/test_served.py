"""A served loader gives what torch's own gives, each item once, shared by jobs; and outlives its server."""

from __future__ import annotations

import gc
import itertools
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from headway.core.channel import connect
from headway.core.errors import BackgroundError, DamageError, FormatError, HeadwayError, InputError
from headway.data import DataLoader, DataServer, DataShareError, Pipeline, SyntheticJpeg, generator
from headway.data.messages import FROM_SERVER
from headway.data.runtime import served
from headway.data.runtime.examples import equal
from tests.paths import ROOT
from tests.test_server import facts, until

Named = namedtuple("Named", ["x", "y"])


class Rows(Dataset):
    """Item -> tensors, numbers, texts, nested; reads are noted in a file, so that any process's count."""

    def __init__(self, size=40, note=None, nap_s=0.0):
        self.size, self.note, self.nap_s = size, note, nap_s

    def __len__(self):
        return self.size

    def __getitem__(self, k):
        if self.note is not None:
            with open(self.note, "a") as file:
                file.write(f"{k}\n")
        time.sleep(self.nap_s)
        return {"x": torch.full((2, 3), k), "y": [k / 2, (np.float32(k), f"n{k}")], "id": k}


@pytest.fixture(autouse=True)
def runtime(monkeypatch):
    """A runtime folder of the test's own (short: a socket's path is), whose servers end with it."""
    folder = Path(tempfile.mkdtemp())
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    yield folder / "headway"
    for path in (folder / "headway").glob("*.sock"):
        end(path)
    shutil.rmtree(folder)


def server_of(path):
    channel = connect(path, 0.0, types=FROM_SERVER)
    channel.close()
    return channel.peer.pid


def end(path, number=signal.SIGTERM):
    """End the server at `path` and wait until it is gone."""
    try:
        pid = server_of(path)
    except HeadwayError:
        return
    os.kill(pid, number)
    until(lambda: has_ended(pid))


def has_ended(pid):
    """Whether a process is gone with all its threads, or waits for its parent (init) to take note."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        return state == "Z" and len(os.listdir(f"/proc/{pid}/task")) == 1
    except OSError:
        return True


def only(folder):
    """The one server that runs."""
    (path,) = folder.glob("*.sock")
    return path


def ids(batches):
    return [item for batch in batches for item in batch["id"].tolist()]


@pytest.mark.parametrize("options", [{}, {"batch_size": 7}, {"batch_size": 7, "drop_last": True}, {"batch_size": None}])
def test_in_order_it_gives_what_torch_gives(options):
    ours = list(DataLoader(Rows(20), server="auto", **options))

    assert equal(ours, list(torch.utils.data.DataLoader(Rows(20), **options)))


def test_a_collate_function_runs_here_on_the_examples_as_they_are():
    seen = []

    def collate(examples):
        seen.extend(examples)
        return torch.stack([example["x"] for example in examples])

    batches = list(DataLoader(Rows(6), batch_size=3, collate_fn=collate, server="auto"))

    assert equal(seen, [Rows(6)[k] for k in range(6)])
    assert [batch.shape for batch in batches] == [(3, 2, 3)] * 2


def test_every_epoch_is_each_item_once_in_another_order(runtime):
    loader = DataLoader(Rows(), batch_size=6, shuffle=True, server="auto")
    epochs = [ids(loader) for _ in range(3)]

    assert [sorted(epoch) for epoch in epochs] == [list(range(40))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert len(loader) == 7
    assert loader.workers_used == "server"


def test_jobs_of_other_processes_share_the_reading_also_of_overlapping_subsets(runtime, tmp_path):
    """The datasets are of one script, so of `__main__`; a lambda and a local class are in them."""
    script = tmp_path / "job.py"
    script.write_text(
        "import sys, time, torch\nfrom headway.data import DataLoader, DataServer\n"
        "class Mine(torch.utils.data.Dataset):\n"
        "    def __init__(self, note): self.note, self.f = note, lambda k: {'id': k}\n"
        "    def __len__(self): return 60\n"
        "    def __getitem__(self, k):\n"
        "        with open(self.note, 'a') as file: file.write(f'{k}\\n')\n"
        "        return self.f(k)\n"
        "data = Mine(sys.argv[2])\n"
        "items = list(range(*map(int, sys.argv[1].split(','))))\n"
        "loader = DataLoader(torch.utils.data.Subset(data, items), 4, shuffle=True,\n"
        "                    server=DataServer(order='shared', cache_bytes=1 << 20))\n"
        "for _ in range(2):\n"
        "    assert sorted(i for b in loader for i in b['id'].tolist()) == items\n"
        "print('done')\n"
    )
    note = tmp_path / "reads"
    command = [sys.executable, str(script)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    jobs = [
        subprocess.Popen([*command, span, str(note)], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for span in ("0,40", "20,60")
    ]
    answers = [job.communicate(timeout=100) for job in jobs]

    assert [out for out, _ in answers] == [b"done\n"] * 2, answers
    # Besides, the first and the last item are looked at four times before they are served.
    assert len(note.read_text().split()) == 60 + 8
    assert len(list(runtime.glob("*.sock"))) == 1


def test_ranks_of_a_job_share_its_global_batches(monkeypatch):
    options = {"batch_size": 3, "shuffle": True, "world_size": 2, "server": DataServer(job="mine")}
    ranks = [DataLoader(Rows(), rank=rank, **options) for rank in (0, 1)]
    taken = [[], []]

    def run(rank):
        taken[rank] = [[batch["id"].tolist() for batch in ranks[rank]] for _ in range(2)]

    # Loaders number themselves as they begin; in two processes each is its process's first.
    monkeypatch.setattr(served, "_number", itertools.repeat(0))
    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    for epoch in (0, 1):
        assert sorted(sum(sum((taken[rank][epoch] for rank in (0, 1)), []), [])) == list(range(40))  # noqa: RUF017
        assert [len(batch) for batch in taken[0][epoch]] == [3] * 6 + [2]


def test_a_state_in_mid_epoch_goes_on_with_what_is_left_on_another_world_and_server(runtime):
    loader = DataLoader(Rows(), batch_size=4, shuffle=True, server=DataServer(job="one"))
    iterator = iter(loader)
    taken = ids(next(iterator) for _ in range(3))
    state = loader.state_dict()
    del iterator
    end(only(runtime))
    again = DataLoader(Rows(), batch_size=3, shuffle=True, server="auto")
    again.load_state_dict(state, allow_batch_change=True)
    rest = ids(again)

    assert sorted(taken + rest) == list(range(40))
    assert len(state["remaining"]) < 100
    assert again.state_dict()["epoch"] == state["epoch"] + 1
    assert sorted(ids(again)) == list(range(40))


def test_a_state_before_and_at_the_end_of_an_epoch_is_the_start_of_one():
    loader = DataLoader(Rows(8), batch_size=4, server="auto")
    fresh = loader.state_dict()
    iterator = iter(loader)
    next(iterator), next(iterator)
    before_stop = loader.state_dict()
    assert next(iterator, None) is None
    after_stop = loader.state_dict()
    again = DataLoader(Rows(8), batch_size=4, server="auto")
    again.load_state_dict(after_stop)

    assert fresh["epoch"] == 0
    assert before_stop["epoch"] == after_stop["epoch"] == 1
    assert ids(again) == list(range(8))


def test_leaving_an_epoch_early_begins_the_next_one_whole(runtime):
    loader = DataLoader(Rows(), batch_size=4, shuffle=True, server="auto")
    for batch in loader:
        assert len(batch["id"]) == 4
        break

    assert sorted(ids(loader)) == list(range(40))
    assert facts(only(runtime))["clients"] == 1


def test_several_iterators_at_once_are_apart(runtime):
    loader = DataLoader(Rows(), batch_size=4, shuffle=True, server="auto")
    pairs = list(zip(loader, loader, strict=True))

    assert all(sorted(ids(side)) == list(range(40)) for side in zip(*pairs, strict=True))


def test_batches_are_ours_to_write_on_and_stay_what_they_are_however_many_are_kept():
    kept = []
    for batch in DataLoader(Rows(), batch_size=2, server="auto"):
        batch["x"].add_(1)
        kept.append(batch)

    assert [batch["x"][:, 0, 0].tolist() for batch in kept] == [[k + 1, k + 2] for k in range(0, 40, 2)]


def test_a_batch_that_is_let_go_gives_its_slot_back(runtime):
    loader = DataLoader(Rows(), batch_size=2, server="auto")
    iterator = iter(loader)
    link = loader._links[0]
    first = next(iterator)
    row = first["x"][0]
    del first
    gc.collect()

    assert len(link.held._out) == 1
    del row
    gc.collect()
    assert len(link.held._out) == 0


def test_it_outlives_its_server_killed_in_mid_epoch_up_to_three_times(runtime):
    loader = DataLoader(Rows(nap_s=0.002), batch_size=2, shuffle=True, server="auto")
    taken, kills = [], 0
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for batch in loader:
            taken += batch["id"].tolist()
            if len(taken) in (6, 18, 30):
                end(only(runtime), signal.SIGKILL)
                kills += 1

    assert sorted(taken) == list(range(40))
    assert kills == 3
    behind = [int(re.search(r"behind the (\d+) batches .* none is lost", str(one.message))[1]) for one in told]
    # What had come before the kill is taken first: up to the server's window.
    assert all(killed <= at <= killed + 4 for at, killed in zip(behind, (3, 9, 15), strict=True))
    assert loader._links[0].restarts == 3
    iterator = iter(loader)
    next(iterator)
    end(only(runtime), signal.SIGKILL)
    with pytest.raises(BackgroundError, match=r"was lost 4 times.*state_dict"):
        list(iterator)


def test_two_jobs_and_the_ranks_of_one_outlive_the_same_server(runtime, monkeypatch):
    """Whoever notices first starts another, the others find it; each rank tells what it had."""
    monkeypatch.setattr(served, "_number", itertools.repeat(0))
    data, taken, begun = Rows(60, nap_s=0.001), {}, threading.Barrier(4, timeout=60)

    def train(name, **options):
        loader = DataLoader(data, batch_size=3, shuffle=True, server=DataServer(job=name[0]), **options)
        taken[name] = []
        for number, batch in enumerate(loader):
            taken[name] += batch["id"].tolist()
            if number == 4:
                begun.wait()
                begun.wait()

    names = {"a": {}, "b0": {"rank": 0, "world_size": 2}, "b1": {"rank": 1, "world_size": 2}}
    threads = [threading.Thread(target=train, args=(name,), kwargs=options) for name, options in names.items()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the restarts
        for thread in threads:
            thread.start()
        begun.wait()
        end(only(runtime), signal.SIGKILL)
        begun.wait()
        for thread in threads:
            thread.join(60)

    assert sorted(taken["a"]) == sorted(taken["b0"] + taken["b1"]) == list(range(60))


def test_a_server_started_by_hand_ends_its_clients_with_one_clear_error(runtime, tmp_path):
    command = [sys.executable, "-m", "headway.cli", "data", "serve", "tests.test_served:Rows", "--socket"]
    path = Path(tempfile.mkdtemp()) / "s"
    served = subprocess.Popen([*command, str(path)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert served.stdout.readline().decode().strip() == str(path)
    loader = DataLoader(Rows(), batch_size=2, server=str(path))
    iterator = iter(loader)
    next(iterator)
    served.kill()
    served.communicate()

    with pytest.raises(BackgroundError, match="Start it again; state_dict"):
        list(iterator)
    shutil.rmtree(path.parent)


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
        (FormatError("torn"), FormatError),
        (DamageError("torn"), DamageError),
        (KeyError("torn"), KeyError),
        (OSError(5, "torn"), OSError),
        (UnicodeDecodeError("utf-8", b"x", 0, 1, "torn"), RuntimeError),
        (StopIteration("torn"), RuntimeError),
        (SystemExit("torn"), RuntimeError),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
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


@pytest.mark.parametrize("empty", [[], Subset(Rows(4), [])], ids=["list", "subset"])
def test_an_empty_dataset_has_an_empty_epoch_and_no_server(runtime, empty):
    loader = DataLoader(empty, 4, num_workers=1, persistent_workers=True, timeout=5, server="auto")

    assert loader.state_dict()["epoch"] == 0
    assert [list(loader), list(loader), len(loader)] == [[], [], 0]
    assert loader.state_dict()["epoch"] == 2
    assert not runtime.exists()


class Holds(Rows):
    def __getitem__(self, k):
        return {"odd": object()}


def test_what_cannot_be_sent_is_named():
    with pytest.raises(InputError, match=r"\['odd'\] is of type object") as caught:
        list(DataLoader(Holds(), server="auto"))
    assert "RuntimeError" not in str(caught.value)


class Draws(Rows):
    """Draws in the way that is asked for."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def __getitem__(self, k):
        noise = {"keyed": lambda: generator().random(), "torch": lambda: torch.rand(1).item(), "no": lambda: 0.0}
        return {"id": k, "noise": noise[self.how]()}


@pytest.mark.parametrize(("how", "one_thread"), [("no", False), ("keyed", False), ("torch", True)])
def test_random_draws_are_new_each_time_and_seen_for_what_they_need(runtime, how, one_thread):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    loader = DataLoader(Draws(how), batch_size=5, shuffle=True, server=DataServer(cache_bytes=1 << 20))
    epochs = [{i: n for b in loader for i, n in zip(b["id"].tolist(), b["noise"].tolist(), strict=True)} for _ in "12"]

    assert bool(facts(only(runtime))["notes"]) == one_thread
    assert all((epochs[0][k] == epochs[1][k]) == (how == "no") for k in range(40))
    assert torch.equal(before, torch.get_rng_state())
    assert how == "no" or len(set(epochs[0].values())) == 40


def test_a_pipeline_is_served_in_forms_and_equals_itself_where_nothing_is_drawn(runtime):
    pipeline = Pipeline(SyntheticJpeg(12, 48, 32)).decode().resize(16, 24).batch(4)
    ours = list(pipeline.loader(server=DataServer(cache_bytes=1 << 20)))

    assert equal([dict(batch) for batch in ours], list(pipeline.loader()))
    assert ours[0]["data"].is_contiguous(memory_format=torch.channels_last)
    assert facts(only(runtime))["forms"] == ["encoded", "decoded"]


def test_a_pipelines_filter_and_collate_function_work_when_it_is_served(runtime):
    pipeline = Pipeline(SyntheticJpeg(9, 48, 32)).decode().flip().filter(lambda image: image[0, 0, 0] % 2 == 0)
    loader = pipeline.batch(3).loader(server="auto", collate_fn=len)

    assert sum(loader) + loader.dropped == 9
    assert facts(only(runtime))["forms"] == ["encoded", "decoded", "augmented"]


def test_a_pipelines_ragged_examples_are_the_error_that_they_are_without_a_server():
    pipeline = Pipeline(SyntheticJpeg(4, 48, 32)).decode().map(lambda image: image[: 8 + image[0, 0, 0] % 16])
    for options in ({}, {"server": "auto"}):
        with pytest.raises(InputError, match=r"example \d is uint8\[.*, the batch uint8\[.*pass a collate_fn"):
            list(pipeline.batch(4).loader(**options))


def test_a_batch_that_a_filter_took_whole_is_left_out_and_counted():
    loader = Pipeline(SyntheticJpeg(5, 48, 32)).filter(lambda raw: False).batch(2).loader(server="auto")

    assert (list(loader), loader.dropped, loader.state_dict()["epoch"]) == ([], 5, 1)


@pytest.mark.parametrize("made", [0.1, (1, 2.0), {"a": 3}, "text"], ids=["number", "tuple", "dict", "text"])
def test_a_pipeline_of_anything_gives_the_same_with_and_without_a_server(made):
    pipeline = Pipeline(SyntheticJpeg(4, 48, 32)).map(lambda raw: made).batch(4)

    assert equal([dict(b) for b in pipeline.loader(server="auto")], [dict(b) for b in pipeline.loader(num_workers=0)])


def test_datasets_in_memory_serve_too():
    rows = torch.arange(30.0).reshape(10, 3)

    assert equal(list(DataLoader(TensorDataset(rows), 4, server="auto")), [[rows[:4]], [rows[4:8]], [rows[8:]]])


def test_a_subset_with_repeated_items_is_a_dataset_of_its_own():
    assert sorted(ids(DataLoader(Subset(Rows(), [3, 3, 7]), 2, shuffle=True, server="auto"))) == [3, 3, 7]


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


def test_a_server_whose_starter_did_not_wait_serves_the_next_caller(runtime):
    data = Rows(4, nap_s=0.2)
    with pytest.raises(RuntimeError, match="timed out"):
        iter(DataLoader(data, timeout=0.1, server="auto"))
    pid = server_of(only(runtime))

    assert ids(DataLoader(data, server="auto")) == [0, 1, 2, 3]
    assert server_of(only(runtime)) == pid


def test_persistent_workers_and_pinning_are_accepted():
    loader = DataLoader(Rows(8), 4, num_workers=2, persistent_workers=True, pin_memory=True, server="auto")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there is nothing to pin for
        assert [ids(loader), ids(loader)] == [list(range(8))] * 2


def test_a_dataset_changed_between_epochs_gets_a_server_of_its_own(runtime):
    data = Rows(8)
    loader = DataLoader(data, 4, server="auto")
    list(loader)
    data.size = 6
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch counts the length that the loader had

        assert sorted(ids(loader)) == list(range(6))
    assert len(list(runtime.glob("*.sock"))) == 2


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
    monkeypatch.setattr(served, "_number", itertools.repeat(0))
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    names = {}
    for run, rank in itertools.product("ab", (0, 1)):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", f"/tmp/torchelastic_{run}/none_x/attempt_0/{rank}/error.json")
        names[run, rank] = served._job_name(None, 2)

    assert names["a", 0] == names["a", 1] != names["b", 0] == names["b", 1]


def test_nobody_at_a_path_is_one_clear_error(runtime):
    with pytest.raises(HeadwayError, match="nobody listens"):
        iter(DataLoader(Rows(), server=str(runtime.parent / "none")))


def test_what_cache_and_order_did_is_told_at_the_end_of_a_pass_by_rank_0(monkeypatch):
    told = []
    monkeypatch.setattr(served.account, "counted", lambda name, **numbers: told.append((name, numbers)))
    options = DataServer(order="opportunistic", cache_bytes=1 << 20, job="one")
    loader = DataLoader(Rows(20), 5, shuffle=True, server=options)

    for _ in range(2):
        assert sorted(ids(loader)) == list(range(20))
    assert [name for name, _ in told] == ["server", "order"] * 2
    assert [numbers["items"] for _, numbers in told[1::2]] == [20, 20]
    assert told[2][1]["hits_decoded"] == 20
    assert len(list(DataLoader(Rows(20), 5, shuffle=True, server=options, rank=1, world_size=2))) == 2
    assert len(told) == 4
