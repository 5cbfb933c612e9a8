"""Copies of a state beside the work that changes it: an emulated device runs its streams in every order they allow."""

import random
from collections import Counter
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import pytest
import torch

import headway
from headway.checkpoint import engine
from headway.checkpoint.agent.messages import Committed, Failed
from headway.checkpoint.agent.saving import TornError, check_sums
from headway.checkpoint.saves import saver, snapshot
from headway.checkpoint.state import writers
from headway.core.errors import BackgroundError
from tests.test_engine import Every


class Work:
    """One thing that a stream does, once what it comes after is done."""

    def __init__(self, act, after):
        self.act, self.after, self.is_done = act, after, False


class Stream:
    """A queue of the device."""

    def __init__(self, device):
        self.device, self.queue, self.last, self.after = device, [], None, []
        device.streams.append(self)

    def add(self, act=lambda: None):
        assert not self.device.is_capturing, "work of ours became part of a graph"
        work = Work(act, self.after)
        self.after, self.last = [], work
        self.queue.append(work)
        return work

    def wait_stream(self, other):
        assert not self.device.is_capturing
        self.after = [*self.after, *([other.last] if other.last else [])]

    def wait_event(self, event):
        assert not self.device.is_capturing
        self.after = [*self.after, event.work]


class Event:
    def __init__(self, device):
        self.device = device

    def record(self, stream):
        self.work = stream.add()

    def query(self):
        assert not self.device.is_capturing
        return self.work.is_done

    def synchronize(self):
        self.device.run(until=self.work)

    def elapsed_time(self, other):
        return 1.0


class Device:
    """Streams whose work is done in a random order of those that waits and queues allow; tensors lie on the host."""

    def __init__(self, seed):
        self.random, self.streams, self.is_capturing = random.Random(seed), [], False
        self.main = self.current = Stream(self)
        self.places = set()

    def run(self, most=10**9, until=None):
        """Do up to `most` things, or as many as it takes until that one is done."""
        while most and not (until and until.is_done):
            ready = [s for s in self.streams if s.queue and all(work.is_done for work in s.queue[0].after)]
            if not ready:
                assert not any(s.queue for s in self.streams), "streams wait for each other"
                return
            work = self.random.choice(ready).queue.pop(0)
            work.act()
            work.is_done, most = True, most - 1

    @contextmanager
    def on(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def copy(self, pairs):
        for slot, source in pairs:
            to, of = slot.view(-1), source.detach().view(-1)
            for half in (slice(0, 4), slice(4, 8)):
                self.current.add(lambda to=to, of=of, half=half: to[half].copy_(of[half]))

    def sums(self, tensors):
        tensors = [tensor.detach() for tensor in tensors]
        found = torch.zeros(len(tensors), dtype=torch.int64)
        for k, tensor in enumerate(tensors):
            self.current.add(lambda k=k, tensor=tensor: found[k : k + 1].copy_(writers_sums([tensor])))
        return found

    def clones(self, sources, *_):
        made = [torch.empty_like(source) for source in sources]
        self.copy(zip(made, sources, strict=True))
        return made, None

    def install(self, patch):
        cuda = {
            "current_stream": lambda device=None: self.current,
            "stream": self.on,
            "Stream": lambda device=None: Stream(self),
            "Event": lambda enable_timing=False: Event(self),
        }
        for name, value in cuda.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: tensor.data_ptr() in self.places))
        patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
        patch.setattr(torch.cuda.graphs.CUDAGraph, "replay", lambda graph: graph.act())
        for module in (snapshot, writers):
            patch.setattr(module, "sums_of", self.sums)
        patch.setattr(snapshot, "_queue", self.copy)
        patch.setattr(snapshot, "_clones", self.clones)
        patch.setattr(saver, "cuda_device_of", lambda tensors: None)
        patch.setattr(engine, "capturing", lambda: self.is_capturing)
        patch.setattr(engine, "host_has_devices", lambda: True)


writers_sums = writers.sums_of


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (torch.nn.Parameter(torch.zeros(8)) for _ in range(3))
        self.register_buffer("seen", torch.zeros(8))


class Sgd(torch.optim.Optimizer):
    """An optimizer whose update is work of the device; it makes its state at once."""

    def __init__(self, model, write):
        super().__init__(model.parameters(), {"lr": 1.0})
        self.write = write
        for name, parameter in model.named_parameters():
            self.state[parameter]["momentum"] = torch.zeros(8)
            assert name in "abc"

    def step(self, closure=None):
        self.write(update=True)


class Agent:
    """Stands in for the agent: compares each image with every state that there was between save and next update."""

    def __init__(self, job):
        self.job, self.told, self.pid = job, [], None
        self.counts = Counter()

    @property
    def outstanding(self):
        return self.told

    def arena(self, *_):
        pass

    def layout(self, layout):
        self.slots = layout.slots

    def persist(self, save):
        image = self.job.ckpt._saver._arenas._images[save.number]
        try:
            check_sums(image.memory, self.slots, save.sums)
        except TornError as error:
            self.counts["refused"] += 1
            self.told.append(Failed(save.step, "TornError", str(error)))
            return
        found = {told.fqn: slot.tolist() for told, slot in zip(self.slots, image.slots, strict=True)}
        self.counts["good" if self.job.is_state(save.step, found) else "torn"] += 1
        self.told.append(
            Committed(step=save.step, path="", root="", num_bytes=0, ended_ns=save.begun_ns + 1, phases=())
        )

    def poll(self, timeout_s=0.0):
        told, self.told = self.told, []
        return told

    def close(self):
        pass

    leave = close


class Job:
    """Training on an emulated device, with what real scripts do to parameters besides updates."""

    def __init__(self, seed, patch, root, mode):
        self.device, self.model, self.number, self.epoch = Device(seed), Model(), 0, 0
        self.device.install(patch)
        self.opt = Sgd(self.model, self.write)
        self.tensors = dict(self.model.state_dict())
        for number, parameter in enumerate(self.model.parameters()):
            self.tensors[f"opt.{number}"] = self.opt.state[parameter]["momentum"]
        self.device.places = {tensor.data_ptr() for tensor in self.tensors.values()}
        self.values = dict.fromkeys(self.tensors, 0.0)
        self.moments, self.begun = [(0, dict(self.values))], {}
        patch.setattr(saver, "AgentLink", lambda hello: Agent(self))
        state = {"model": self.model, "opt": self.opt}
        self.ckpt = headway.Checkpointer(root, **state, policy=Every(1), device_snapshot=mode, on_error="raise")
        self.ckpt.attach(self.opt)
        self.agent = self.ckpt._opened().link
        begin = self.ckpt._saver.begin

        def noted(step, late):
            self.begun[step] = (self.epoch, self.values["seen"])
            return begin(step, late)

        self.ckpt._saver.begin = noted

    def put(self, name, *, is_versioned):
        """Launch one write; the host knows its value at once, the device later."""
        self.number += 1
        value, tensor = float(self.number), self.tensors[name]
        self.device.main.add(lambda: tensor.data.fill_(value))
        if is_versioned:
            torch.autograd.graph.increment_version([tensor])
        self.values[name] = value
        self.moments.append((self.epoch, dict(self.values)))

    def write(self, update=False):
        """Launch an update, which a capture only notes."""
        if self.device.is_capturing:
            return
        self.epoch += 1
        for name in self.tensors:
            if name != "seen":
                self.put(name, is_versioned=update)
        self.epoch += 1
        self.moments.append((self.epoch, dict(self.values)))

    def is_state(self, step, found):
        """Whether an image holds a state of its step: buffers where the save began, the rest at one moment."""
        epoch, seen = self.begun[step]
        states = [values for then, values in self.moments if then == epoch]
        plain = {
            fqn.removeprefix("model.").replace(".state", "").removesuffix(".momentum"): found[fqn] for fqn in found
        }
        return plain["seen"] == [seen] * 8 and any(
            all(cells == [values[name]] * 8 for name, cells in plain.items() if name != "seen") for values in states
        )

    def act(self, what):
        """Do one thing that a script may do."""
        if what == "update":
            self.put("seen", is_versioned=True)  # the forward before it
            self.opt.step()
        elif what == "replay":
            torch.cuda.graphs.CUDAGraph.replay(SimpleNamespace(act=self.write))
        elif what == "capture":
            self.device.is_capturing = True
            self.opt.step()
            self.ckpt.maybe_save()
            self.device.is_capturing = False
        elif what == "save":
            self.ckpt.maybe_save()
        elif what == "explicit":
            self.ckpt.save(self.ckpt._step + 1)
            self.ckpt._step += 1
        elif what == "forward":
            self.put("seen", is_versioned=True)
        else:
            self.put(self.device.random.choice(["a", "b", "opt.1"]), is_versioned=what == "stray")
        self.device.run(self.device.random.choice([0, 3, 20, 100]))

    def end(self):
        """Return what became of the saves."""
        self.device.run()
        self.ckpt._saver.complete()
        self.ckpt._saver.close()
        self.ckpt._saver = None
        self.ckpt.close()
        return self.agent.counts


ACTS = ["update"] * 5 + ["replay", "save", "explicit", "forward", "stray", "hidden"]


def orders(seeds, patch, root, mode="host", acts=ACTS, most=14):
    """Run jobs of random orders; return how many saves were good, refused, and torn."""
    counts = Counter()
    for seed in seeds:
        with patch.context() as inner:
            job, more = Job(seed, inner, root, mode), ["capture"] if seed % 10 == 0 else []
            for what in [*["update"] * 3, *job.device.random.choices([*acts, *more], k=most)]:
                with suppress(BackgroundError):  # what was refused is told
                    job.act(what)
            counts.update(job.end())
    return counts["good"], counts["refused"], counts["torn"]


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 1000, 100))
def test_no_order_of_saves_updates_replays_captures_and_stray_writes_tears_a_checkpoint(monkeypatch, tmp_path, first):
    good, refused, torn = orders(range(first, first + 100), monkeypatch, tmp_path)

    assert torn == 0
    assert good > 500
    assert 0 < refused < 100


@pytest.mark.slow
def test_a_copy_inside_of_the_device_is_torn_by_no_writer_and_never_refused(monkeypatch, tmp_path):
    good, refused, torn = orders(range(100), monkeypatch, tmp_path, "device")

    assert (refused, torn) == (0, 0)
    assert good > 500


WITHOUT = {
    "copying again": (snapshot.Snapshot, "renew", lambda self: None),
    "waits of replays": (engine, "before", lambda targets, call: []),
    "sums": (writers, "LOG", writers.LOG),
    "waits of updates": (snapshot.Snapshot, "fence", lambda self: None),
}


@pytest.mark.slow
@pytest.mark.parametrize("left_out", WITHOUT)
def test_each_of_the_means_is_needed(monkeypatch, tmp_path, left_out):
    """Without the sums as well, which refuse what the others would have prevented; they alone see hidden writes."""
    owner, name, instead = WITHOUT[left_out]
    monkeypatch.setattr(owner, name, instead)
    monkeypatch.setattr("tests.test_snapshot_races.check_sums", lambda *_: None)

    acts = [what for what in ACTS if what != "hidden" or left_out == "sums"]

    assert orders(range(60), monkeypatch, tmp_path, acts=acts)[2] > 0


@pytest.mark.slow
def test_who_writes_in_every_step_is_found_before_saves_rely_on_nobody_doing_so(monkeypatch, tmp_path):
    """As a script that clips weights does; no save is refused, so that it goes on."""
    counts = Counter()
    for seed in range(30):
        with monkeypatch.context() as patch:
            job = Job(seed, patch, tmp_path, "host")
            for _ in range(8):
                job.act("update")
                job.put("a", is_versioned=False)
            counts.update(job.end())

    assert counts == {"good": 240}


def test_an_optimizer_that_is_attached_later_is_tried_before_saves_rely_on_it(monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        job = Job(1, patch, tmp_path, "host")
        for _ in range(4):
            job.act("update")
            job.device.run()
        relied = [job.ckpt._writers.are_known(job.tensors["a"])]
        job.ckpt.attach(Sgd(job.model, lambda update: None))
        for _ in range(4):
            job.act("update")
            job.device.run()
            relied.append(job.ckpt._writers.are_known(job.tensors["a"]))
        counts = job.end()

    assert relied == [True, False, False, True, True]
    assert counts == {"good": 8}


def test_the_agent_refuses_an_image_whose_sums_differ_and_nothing_of_it_is_committed(monkeypatch, tmp_path):
    model = torch.nn.Linear(3, 2)
    weight = model.weight.detach()
    right = (writers.word_bytes(weight), int(writers_sums([weight])[0]))
    with headway.Checkpointer(tmp_path, model=model) as ckpt:
        monkeypatch.setattr(saver, "_sums", lambda pending: {("model.weight", (0, 0)): right})
        ckpt.save(1, block="durable")
        monkeypatch.setattr(saver, "_sums", lambda pending: {("model.weight", (0, 0)): (right[0], right[1] + 1)})
        with pytest.raises(BackgroundError, match=r"'model.weight' changed while it was copied.*maybe_save"):
            ckpt.save(2, block="durable")

        assert ckpt._saver.is_torn
        assert ckpt.restore().step == 1
