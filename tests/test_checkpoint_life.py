"""A Checkpointer's long life: what it holds, and its agent, is as much after the last save as after the first few."""

import collections
import gc
import os
import signal

import psutil
import pytest
import torch

import headway
from headway.checkpoint import CheckpointPolicy
from headway.core.errors import BackgroundError, InputError
from headway.core.files.private import runtime_directory

pytestmark = [
    pytest.mark.filterwarnings("ignore:the checkpoint agent:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:step . is restored, but"),
]


@pytest.fixture(autouse=True)
def a_runtime_directory_of_its_own(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("rt")))
    gc.collect()  # what earlier tests left


class Growing:
    """An object whose pickle grows and whose keys change."""

    def __init__(self):
        self.num_seen = 0

    def state_dict(self):
        self.num_seen += 1
        return {"seen": list(range(100 * self.num_seen)), f"at {self.num_seen}": self.num_seen}

    def load_state_dict(self, state):
        raise AssertionError("nothing is restored here")


def entries(thing, seen=None):
    """Return how many entries all containers hold that can be reached from an object of headway's."""
    seen = set() if seen is None else seen
    if id(thing) in seen or isinstance(thing, type):
        return 0
    seen.add(id(thing))
    if isinstance(thing, dict):
        inner = [*thing, *thing.values()]
    elif isinstance(thing, list | tuple | set | frozenset | collections.deque):
        inner = list(thing)
    elif type(thing).__module__.startswith("headway"):
        slots = [getattr(thing, name, None) for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
        return sum(entries(inner, seen) for inner in [*getattr(thing, "__dict__", {}).values(), *slots])
    else:
        return 0
    return len(inner) + sum(entries(part, seen) for part in inner)


def resources(process):
    """Return what a process holds of the system: descriptors, threads, children, images mapped."""
    with open(f"/proc/{process.pid}/maps") as maps:
        images = sum("memfd:headway-image" in line for line in maps)
    return process.num_fds(), process.num_threads(), len(process.children()), images


def num_checkpointers():
    """Return how many have not been collected."""
    return sum(type(thing) is headway.Checkpointer for thing in gc.get_objects())


def left():
    """Return what lies in the runtime directory, and of each its size: of a ledger the words, as its numbers grow."""
    found = {entry.name: entry for entry in runtime_directory().iterdir()}
    return {
        name: len(entry.read_text().split()) if entry.suffix == ".ledger" else entry.stat().st_size
        for name, entry in found.items()
    }


def test_nothing_grows_with_the_number_of_saves_of_a_state_that_grows(tmp_path, monkeypatch):
    monkeypatch.setattr("headway.checkpoint.slowdown.REMEMBERED", 4)  # windows: as many as there ever are, soon
    model = torch.nn.Sequential(torch.nn.Embedding(100, 8), torch.nn.Linear(8, 8))
    growing, policy, found, fds = Growing(), CheckpointPolicy(budget=0.9), [], []
    with headway.Checkpointer(tmp_path, model=model, growing=growing, policy=policy) as ckpt:
        for step in range(1, 19):
            model[0] = torch.nn.Embedding(100 + step, 8)
            growing.num_seen = step
            ckpt.maybe_save(step)
            ckpt.save(1000 + step, block="durable")
            ckpt.wait()
            if step % 6 == 0:
                ours, its = resources(psutil.Process()), resources(psutil.Process(ckpt._saver.link.pid))
                found.append((entries(ckpt), ours, its[1:], left()))
                fds.append(its[0])

    assert found[0] == found[1] == found[2]
    assert fds[2] - fds[0] < 5  # it may be removing an old checkpoint meanwhile; 24 saves went by


@pytest.mark.slow
def test_steps_that_are_saved_again_and_again_take_no_memory_and_are_each_a_checkpoint(tmp_path):
    model = torch.nn.Linear(2, 2)
    with headway.Checkpointer(tmp_path, model=model) as ckpt:
        counts = []
        for step in [3, 4, 3, 3, 4, 5, 5, 6, 2, 7]:
            model.weight.data.fill_(float(len(counts)))
            ckpt.save(step, block="durable")
            model.weight.data.zero_()
            ckpt.restore(step)
            counts.append((entries(ckpt._saver), model.weight[0, 0].item()))

    assert [value for _, value in counts] == [float(number) for number in range(len(counts))]
    assert len({count for count, _ in counts[3:]}) == 1


@pytest.mark.slow
def test_agents_that_are_killed_leave_nothing_behind_once_another_has_ended_well(tmp_path):
    found, model = [], torch.nn.Linear(8, 8)
    before = resources(psutil.Process()), left()
    with headway.Checkpointer(tmp_path, model=model) as ckpt:
        for step in range(1, 4):
            ckpt.save(step, block="durable")
            found.append((entries(ckpt), resources(psutil.Process()), set(left())))
            os.kill(ckpt._saver.link.pid, signal.SIGKILL)
        ckpt.save(4, block="durable")

    assert found[1] == found[2]
    assert (resources(psutil.Process()), left()) == before


@pytest.mark.slow
def test_checkpointers_that_are_closed_give_everything_back(tmp_path):
    model, found = torch.nn.Linear(8, 8), []
    opt, before = torch.optim.AdamW(model.parameters()), num_checkpointers()
    for step in range(1, 4):
        with headway.Checkpointer(tmp_path, model=model, opt=opt) as ckpt:
            ckpt.attach(opt)
            ckpt.restore()
            ckpt.save(step)
        del ckpt
        gc.collect()
        hooks = len(opt._optimizer_step_pre_hooks) + len(opt._optimizer_step_post_hooks)
        found.append((resources(psutil.Process()), left(), hooks, num_checkpointers()))

    assert found[1:] == found[:1] * 2
    assert found[0][1:] == ({}, 0, before)


class Odd:
    """An object that changes after the update, and at times cannot say its state."""

    def __init__(self):
        self.is_well = True

    def state_dict(self):
        if not self.is_well:
            raise ValueError("not now")
        return {}

    def load_state_dict(self, state):
        pass


def test_a_save_whose_end_of_step_cannot_be_read_is_given_up_once_and_the_next_goes_on(tmp_path):
    model, odd, policy = torch.nn.Linear(2, 2), Odd(), CheckpointPolicy()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with headway.Checkpointer(tmp_path, model=model, odd=odd, policy=policy) as ckpt:
        ckpt.attach(opt)
        for _ in range(10):  # the first save is due
            opt.step()
        ticket = ckpt._saver.pending
        before, odd.is_well = entries(ckpt), False
        with pytest.raises(ValueError, match="not now"):
            opt.step()
        opt.step()
        odd.is_well = True
        ckpt.save(50, block="durable")
        after = entries(ckpt)

        with pytest.raises(BackgroundError, match=r"step 10 was not written: ValueError: not now"):
            ticket.result()
        assert after <= before


def test_saves_that_cannot_be_handed_over_leave_nothing_behind_and_can_be_tried_again(tmp_path):
    folder, counts = runtime_directory(), []
    with headway.Checkpointer(tmp_path, model=torch.nn.Linear(2, 2)) as ckpt:
        folder.chmod(0o755)  # nobody may meet an agent there
        for step in (7, 7, 8, 9):
            with pytest.raises(InputError, match="nobody else can enter"):
                ckpt.save(step)
            counts.append((entries(ckpt._saver), resources(psutil.Process())))
        folder.chmod(0o700)
        commit = ckpt.save(7, block="durable").result()

    assert len(set(counts)) == 1
    assert commit.step == 7
