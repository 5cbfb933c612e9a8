"""Input probes: the wait on the training thread, and fetch, run delay, prep and collate where the dataset runs."""

import gc
import itertools
import os
import pickle
import random
import sys
import threading
import time

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from headway.data import DataLoader as OwnLoader
from headway.runtime.calls.probe_input import loader_facts
from headway.runtime.script.batches import batch_bytes
from headway.runtime.script.run_delay import open_schedstat, read_delay
from headway.trace.events.loader_facts import LoaderFacts
from headway.trace.recording.assemble import loaders
from tests.datasets import Sized
from tests.recorded import recording, rows, with_and_without

MS = 1_000_000


class Sleepy(Sized):
    """Each example sleeps, then burns CPU; collate burns some more."""

    def __init__(self, size, sleep_s=0.0, burn_s=0.0, garbage=False):
        self.size, self.sleep_s, self.burn_s, self.garbage = size, sleep_s, burn_s, garbage

    def __getitem__(self, index):
        time.sleep(self.sleep_s)
        burn(self.burn_s)
        if self.garbage:
            gc.collect()
        return torch.full((4,), float(index))


def burn(seconds):
    """Use CPU time of this thread, however busy the machine is."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def burning_collate(examples):
    """Collate, at a cost."""
    burn(0.004)
    return torch.stack(examples)


class Stream(IterableDataset):
    """Seven numbers."""

    def __iter__(self):
        return iter(range(7))


def parts_of(found):
    """Pair each measured load with its parts: (wall, fetch, cpu_wait, prep, collate) in ns."""
    loads = {row["start_ns"]: row for row in found["input.load"]}
    answer = []
    for row in found["input.parts"]:
        wall, cpu, delay, collate = loads[row["start_ns"]]["duration_ns"], row["a"], row["b"], row["c"]
        answer.append((wall, wall - cpu - delay, delay, cpu - collate, collate))
    return answer


@pytest.mark.parametrize("workers", [0, 2])
def test_sleep_is_fetch_work_is_prep_and_collate_is_apart(workers, tmp_path):
    with recording(tmp_path):
        loader = DataLoader(
            Sleepy(32, sleep_s=0.002, burn_s=0.003), batch_size=4, num_workers=workers, collate_fn=burning_collate
        )
        for _ in loader:
            pass
    found = rows(tmp_path, role="loader" if workers else "main")
    parts = parts_of(found)
    walls, fetch, _, prep, collate = (sum(part) for part in zip(*parts, strict=True))

    assert len(found["input.load"]) == len(found["input.parts"]) == 8
    # What is neither core time nor run delay. A load that lost its core between two readings has less; not all do.
    assert max(part[1] for part in parts) >= 4 * 2 * MS * 0.8
    assert fetch <= 32 * 2 * MS * 1.5 + 0.2 * walls
    # A busy host adds to CPU time as well; what was booked to the wrong part would be several times as much.
    assert 32 * 3 * MS <= prep <= 32 * 3 * MS * 2
    assert 8 * 4 * MS <= collate <= 8 * 4 * MS * 2


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_parts_never_exceed_the_whole(workers, tmp_path):
    with recording(tmp_path):
        for _ in DataLoader(TensorDataset(torch.ones(64, 8)), batch_size=4, num_workers=workers):
            pass
    parts = parts_of(rows(tmp_path))

    assert parts
    for wall, *rest in parts:
        assert sum(rest) == wall
        assert min(rest) >= 0


def test_short_loads_of_the_main_process_are_measured_one_in_sixteen_and_later_one_in_sixty_four(tmp_path):
    with recording(tmp_path):
        for _ in DataLoader(TensorDataset(torch.ones(1024, 1)), batch_size=1):
            pass
    found = rows(tmp_path)

    assert len(found["input.load"]) == len([row for row in found["input.next"] if row["b"] >= 0]) == 1024
    assert 256 // 16 + 768 // 64 <= len(found["input.parts"]) < 200


def test_garbage_collection_inside_a_load_is_told_apart(tmp_path):
    with recording(tmp_path):
        for _ in DataLoader(Sleepy(4, garbage=True), batch_size=2):
            pass
    found = rows(tmp_path)

    for row in found["input.parts"]:
        assert 0 < row["d"] <= row["a"]
    assert sum(row["d"] for row in found["input.parts"]) <= sum(row["duration_ns"] for row in found["host.gc"])


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterable_dataset_gives_the_same_data_and_all_its_loads(workers, tmp_path):
    def run():
        return [batch.tolist() for batch in DataLoader(Stream(), batch_size=2, num_workers=workers)]

    plain, recorded = with_and_without(run, tmp_path)
    found = rows(tmp_path)

    assert recorded == plain
    assert len(found["input.load"]) == len(plain)
    assert [row["b"] for row in found["input.next"]] == [*range(len(plain)), -1]


def test_each_batch_names_the_worker_that_made_it_and_its_load(tmp_path):
    with recording(tmp_path):
        seen = [
            batch[0][0].item()
            for _ in range(2)
            for batch in DataLoader(TensorDataset(torch.arange(24.0).reshape(-1, 1)), batch_size=2, num_workers=2)
        ]
    found = rows(tmp_path)
    waits = [row for row in found["input.next"] if row["b"] >= 0]
    workers = {(row["b"], row["c"]): row["d"] for row in found["input.worker"]}

    assert len(seen) == len(waits) == 24
    for row in waits:
        loads = [load for load in found["input.load"] if load["pid"] == workers[row["d"], row["c"]]]
        load = loads[row["b"] // 2]
        assert load["b"] == row["b"] // 2
        assert load["start_ns"] + load["duration_ns"] <= row["start_ns"] + row["duration_ns"]


def test_loaders_are_numbered_by_first_use_and_one_made_anew_keeps_its_number(tmp_path):
    with recording(tmp_path) as session:
        evaluation = DataLoader(TensorDataset(torch.ones(4, 1)), batch_size=4)
        for _ in range(3):
            for _ in DataLoader(TensorDataset(torch.ones(8, 1)), batch_size=4, shuffle=True):
                pass
            for _ in evaluation:
                pass
        facts = session.probes.loaders

    waits = [row["a"] for row in rows(tmp_path)["input.next"] if row["b"] >= 0]
    assert waits == [0, 0, 1] * 3
    assert (facts[0]["dataset_size"], facts[0]["sampler"]) == (8, "RandomSampler")
    assert (facts[1]["dataset_size"], facts[1]["sampler"]) == (4, "SequentialSampler")
    assert (facts[0]["datasets"], facts[1]["datasets"]) == (3, 1)


def test_a_loader_that_was_recorded_pickles_as_any_other(tmp_path):
    def trained():
        loader = DataLoader(range(8), batch_size=4)
        assert len(list(loader)) == 2
        return loader

    with recording(tmp_path):
        recorded = pickle.dumps(trained())

    assert recorded == pickle.dumps(trained())


def test_the_line_that_constructs_a_loader_is_a_fact_of_it_and_of_the_one_a_library_makes_in_its_place(tmp_path):
    library = {"__name__": "trainer.loops", "DataLoader": DataLoader}
    code = "def remade(dataset):\n    return DataLoader(dataset, batch_size=2)"
    exec(compile(code, "/usr/lib/python3/site-packages/trainer/loops.py", "exec"), library)
    dataset, other = TensorDataset(torch.ones(4, 1)), TensorDataset(torch.ones(4, 1))
    with recording(tmp_path) as session:
        here = f"{os.path.basename(__file__)}:{sys._getframe().f_lineno + 1}"
        loaders = [DataLoader(dataset), library["remade"](dataset)]
        loaders.append(library["remade"](other))
        for _ in itertools.chain(*loaders):
            pass
        facts = [LoaderFacts.of(row) for row in session.probes.loaders.values()]

    assert [(fact.constructed, fact.library) for fact in facts[:2]] == [(here, "")] * 2
    assert facts[2].library == "trainer"
    assert facts[2].place == facts[2].constructed == f"{here.partition(':')[0]}:{int(here.partition(':')[2]) + 1}"
    assert LoaderFacts(line="train.py:7").place == "train.py:7"


@pytest.mark.parametrize("dataset", [TensorDataset(torch.ones(8, 1)), list(range(8))])
def test_a_loader_made_anew_over_the_same_dataset_is_told_from_one_over_another(dataset, tmp_path):
    with recording(tmp_path) as session:
        for _ in range(3):
            for _ in DataLoader(dataset, batch_size=4):
                pass
        facts = session.probes.loaders

    assert [(fact["datasets"], fact["loaders"]) for fact in facts.values()] == [(1, 3)]


def test_workers_stay_between_the_passes_of_one_loader_and_not_where_each_pass_has_another(tmp_path):
    dataset = TensorDataset(torch.ones(8, 1))
    asked = {"num_workers": 1, "persistent_workers": True}
    with recording(tmp_path) as session:
        one = DataLoader(dataset, batch_size=4, **asked)
        for _ in range(2):
            for _ in itertools.chain(one, DataLoader(dataset, batch_size=2, **asked)):
                pass
        facts = session.probes.loaders

    assert {fact["batch_size"]: fact["persistent"] for fact in facts.values()} == {4: True, 2: False}


def test_loaders_over_a_buffer_that_grows_are_one_and_its_sizes_are_kept(tmp_path):
    with recording(tmp_path) as session:
        for size in (8, 4, 12):
            for _ in DataLoader(TensorDataset(torch.ones(size, 1)), batch_size=4):
                pass
        (facts,) = session.probes.loaders.values()

    assert (facts["smallest_dataset"], facts["dataset_size"], facts["datasets"]) == (4, 12, 3)


def test_facts_of_a_loader_say_why_it_cannot_be_tuned():
    class NoLength(Dataset):
        def __getitem__(self, index):
            return index

        def __len__(self):
            raise RuntimeError("no length today")

    facts = loader_facts(DataLoader(Stream(), batch_size=None))
    assert facts["dataset_size"] is None
    assert "IterableDataset" in facts["reason_untunable"]
    assert loader_facts(DataLoader(NoLength(), sampler=[0, 1]))["dataset_size"] is None


def test_a_stream_read_by_a_worker_is_a_loader_like_any_other(tmp_path, capfd):
    with recording(tmp_path):
        assert sum(int(batch.sum()) for batch in DataLoader(Stream(), 2, num_workers=1)) == sum(range(7))
    found = rows(tmp_path)

    assert {row["a"] for row in found["input.next"]} == {0}  # its place among the loaders, not "unseen"
    assert "not recorded" not in capfd.readouterr().err


def test_an_exception_in_a_dataset_passes_through_unchanged(tmp_path):
    class Bad(Sleepy):
        def __getitem__(self, index):
            raise ValueError(f"example {index} is broken")

    with recording(tmp_path), pytest.raises(ValueError, match="example 0 is broken"):
        next(iter(DataLoader(Bad(4))))


def test_bytes_of_a_batch_are_counted_through_lists_and_mappings():
    tensor = torch.ones(3, dtype=torch.float64)
    assert batch_bytes({"a": [tensor, (tensor,)], "b": "text", "c": tensor.numpy()}) == 3 * 24
    loop: list = []
    loop.append(loop)
    assert batch_bytes(loop) == 0


def test_a_kernel_without_scheduler_statistics_gives_unknown_not_zero():
    assert read_delay(-1) == -1
    assert read_delay(12345) == -1


class Augmented(Sized):
    """Draws from the generators it is told to draw from, only `often` enough."""

    size = 24

    def __init__(self, *draws, every=1):
        self.draws, self.every = draws, every

    def __getitem__(self, index):
        if index % self.every == 0:
            for draw in self.draws:
                draw()
        return torch.ones(2)


class OwnGenerator(Augmented):
    def __init__(self):
        self.transforms = [np.random.default_rng(0)]

    def __getitem__(self, index):
        return self.transforms[0].random()


def masking_collate(examples):
    """Collate with random masks, as for language models."""
    return torch.stack(examples) * (torch.rand(2) > 0.5)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("dataset", "collate", "draws", "collate_draws"),
    [
        (Augmented(), None, [], []),
        (Augmented(random.random), None, ["random"], []),
        (Augmented(np.random.rand, lambda: torch.rand(1)), None, ["numpy", "torch"], []),
        (Augmented(random.random, every=8), None, ["random"], []),  # seen in the third or fourth batch, or in the first
        (OwnGenerator(), None, ["own"], []),
        (Augmented(), masking_collate, [], ["torch"]),
    ],
    ids=["pure", "random", "numpy and torch", "now and then", "own generator", "collate"],
)
def test_what_examples_draw_from_is_a_fact_of_their_loader(tmp_path, workers, dataset, collate, draws, collate_draws):
    with recording(tmp_path):
        for _ in DataLoader(dataset, batch_size=4, num_workers=workers, collate_fn=collate):
            pass
    facts = loaders(tmp_path)["0"]

    assert (facts["draws"], facts["collate_draws"]) == (draws, collate_draws)


def test_headways_own_seeding_is_no_draw_of_the_dataset(tmp_path):
    with recording(tmp_path):
        for loader in (OwnLoader(Augmented(), 4), DataLoader(Augmented(), 4)):
            for _ in loader:
                pass
    facts = loaders(tmp_path)

    assert [facts[group]["draws"] for group in "01"] == [None, []]
    assert [facts[group]["own"] for group in "01"] == [True, False]


def test_two_loaders_are_told_apart_and_one_that_was_not_read_is_not_judged(tmp_path):
    with recording(tmp_path):
        first, second = DataLoader(Augmented(random.random), num_workers=1), DataLoader(Augmented(), num_workers=1)
        for _, _ in zip(first, second, strict=True):
            pass
        iter(DataLoader(TensorDataset(torch.ones(2))))
    facts = loaders(tmp_path)

    assert [facts[group]["draws"] for group in "012"] == [["random"], [], None]


@pytest.mark.parametrize("workers", [0, 2])
def test_looking_for_draws_changes_no_draw(tmp_path, workers):
    def run():
        random.seed(3), np.random.seed(3), torch.manual_seed(3)
        dataset = Augmented(random.random, np.random.rand, lambda: torch.rand(1))
        for batch in DataLoader(dataset, batch_size=4, shuffle=True, num_workers=workers, collate_fn=masking_collate):
            seen.append(batch.tolist())
        return random.random(), np.random.rand(), torch.rand(1).item()

    seen = []
    plain = run(), seen
    seen = []
    with recording(tmp_path):
        recorded = run(), seen

    assert recorded == plain


def test_statistics_of_a_thread_are_its_own_and_closed_with_it():
    def look():
        descriptor = open_schedstat()
        found.append((descriptor, open_schedstat(), os.readlink(f"/proc/self/fd/{descriptor}")))

    found = []
    for _ in range(3):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    mine = os.readlink(f"/proc/self/fd/{open_schedstat()}")

    assert all(first == second for first, second, _ in found)
    assert mine not in {path for *_, path in found}
    assert len({path for *_, path in found}) == 3
    links = {os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")}
    assert not links & {path for *_, path in found}
