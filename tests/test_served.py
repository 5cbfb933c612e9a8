"""A served loader gives what torch's own gives, each item once, shared by jobs; and outlives its server."""

import gc
import itertools
import os
import subprocess
import sys
import warnings

import pytest
import torch
from torch.utils.data import Subset

from headway.data import DataLoader, DataServer, Pipeline, SyntheticJpeg, generator
from headway.data.bytes.scrutiny import Scrutiny
from headway.data.bytes.torch_examples import equal
from headway.data.service import torch_links as links
from headway.data.service import torch_served as served
from tests.paths import ROOT, python_path
from tests.served_made import Rows, end, ids, only
from tests.served_made import runtime as runtime
from tests.spawn import run_threads
from tests.test_server import facts


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


@pytest.mark.slow
def test_jobs_of_other_processes_share_the_reading_also_of_overlapping_subsets(runtime, tmp_path):
    """The datasets are of one script, so of `__main__`; a lambda and a local class are in them."""
    script = tmp_path / "job.py"
    script.write_text(
        "import sys, time, torch\nfrom headway.data import DataLoader, DataServer\n"
        "from headway.data.bytes.scrutiny import Scrutiny\n"
        "Scrutiny.is_due = lambda *_, **__: False  # nothing is made anew to be compared\n"
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
    env = {**os.environ, "PYTHONPATH": python_path(ROOT)}
    jobs = [
        subprocess.Popen([*command, span, str(note)], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for span in ("0,40", "20,60")
    ]
    answers = [job.communicate(timeout=100) for job in jobs]

    assert [out for out, _ in answers] == [b"done\n"] * 2, answers
    # Besides, the first and the last item are looked at four times before they are served.
    assert len(note.read_text().split()) == 60 + 8
    assert len(list(runtime.glob("*.sock"))) == 1


@pytest.mark.slow  # its loaders have 30 s, which a busy host takes
def test_ranks_of_a_job_share_its_global_batches(monkeypatch):
    options = {"batch_size": 3, "shuffle": True, "world_size": 2, "server": DataServer(job="mine")}
    ranks = [DataLoader(Rows(), rank=rank, **options) for rank in (0, 1)]
    taken = [[], []]

    def run(rank):
        taken[rank] = [[batch["id"].tolist() for batch in ranks[rank]] for _ in range(2)]

    # Loaders number themselves as they begin; in two processes each is its process's first.
    monkeypatch.setattr(links, "_number", itertools.repeat(0))
    run_threads(run, [(rank,) for rank in (0, 1)])

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


@pytest.mark.parametrize("empty", [[], Subset(Rows(4), [])], ids=["list", "subset"])
def test_an_empty_dataset_has_an_empty_epoch_and_no_server(runtime, empty):
    loader = DataLoader(empty, 4, num_workers=1, persistent_workers=True, timeout=5, server="auto")

    assert loader.state_dict()["epoch"] == 0
    assert [list(loader), list(loader), len(loader)] == [[], [], 0]
    assert loader.state_dict()["epoch"] == 2
    assert [*runtime.iterdir()] == []


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


def test_a_batch_that_a_filter_took_whole_is_left_out_and_counted():
    loader = Pipeline(SyntheticJpeg(5, 48, 32)).filter(lambda raw: False).batch(2).loader(server="auto")

    assert (list(loader), loader.dropped, loader.state_dict()["epoch"]) == ([], 5, 1)


@pytest.mark.parametrize("made", [0.1, (1, 2.0), {"a": 3}, "text"], ids=["number", "tuple", "dict", "text"])
def test_a_pipeline_of_anything_gives_the_same_with_and_without_a_server(made):
    pipeline = Pipeline(SyntheticJpeg(4, 48, 32)).map(lambda raw: made).batch(4)

    assert equal([dict(b) for b in pipeline.loader(server="auto")], [dict(b) for b in pipeline.loader(num_workers=0)])


def test_a_subset_with_repeated_items_is_a_dataset_of_its_own():
    assert sorted(ids(DataLoader(Subset(Rows(), [3, 3, 7]), 2, shuffle=True, server="auto"))) == [3, 3, 7]


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


def test_what_cache_and_order_did_is_told_at_the_end_of_a_pass_by_rank_0(monkeypatch):
    told = []
    monkeypatch.setattr(served.account, "counted", lambda name, **numbers: told.append((name, numbers)))
    monkeypatch.setattr(Scrutiny, "is_due", lambda *_, **__: False)  # nothing is made anew to be compared
    options = DataServer(order="opportunistic", cache_bytes=1 << 20, job="one")
    loader = DataLoader(Rows(20), 5, shuffle=True, server=options)

    for _ in range(2):
        assert sorted(ids(loader)) == list(range(20))
    assert [name for name, _ in told] == ["server", "order"] * 2
    assert [numbers["items"] for _, numbers in told[1::2]] == [20, 20]
    assert told[2][1]["hits_decoded"] == 20
    assert len(list(DataLoader(Rows(20), 5, shuffle=True, server=options, rank=1, world_size=2))) == 2
    assert len(told) == 4
