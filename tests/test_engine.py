"""Checkpointer, on one rank: what is saved is restored, at the right moment of a step, and no failure is swallowed."""

import atexit
import os
import signal
import time
import warnings
from itertools import pairwise

import pytest
import torch
import torch.distributed.checkpoint as dcp

import headway
from headway.checkpoint import CheckpointPolicy, Keep
from headway.checkpoint.saves import saver
from headway.checkpoint.saves.snapshot import Snapshot
from headway.core.errors import BackgroundError, DamageError, HeadwayError, InputError
from headway.storage.commit import committed
from tests.checkpoints import flip
from tests.launching import wait_for
from tests.loaders_made import plain
from tests.spawn import in_fork


class Every:
    """A policy of the test's own: save every `steps` steps."""

    inflight = 1

    def __init__(self, steps):
        self.steps, self.seen = steps, []

    def interval(self):
        return self.steps

    def observe(self, timing):
        self.seen.append(timing)

    def observe_failure(self):
        pass

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class Job:
    """A small training job with everything that changes at other times than the update."""

    def __init__(self, root, every=1, **options):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(), torch.nn.Linear(8, 2)
        )
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.sched = torch.optim.lr_scheduler.StepLR(self.opt, 2)
        self.mean = torch.optim.swa_utils.AveragedModel(self.model)
        state = {"model": self.model, "opt": self.opt, "sched": self.sched, "mean": self.mean}
        self.ckpt = headway.Checkpointer(root, **state, policy=Every(every), **options)

    def run(self, steps, *, attach=True, save=False):
        if attach and not self.ckpt._hooks:
            self.ckpt.attach(self.opt)
        for _ in range(steps):
            self.opt.zero_grad()
            self.model(torch.randn(8, 4)).square().mean().backward()
            self.opt.step()
            self.sched.step()
            self.mean.update_parameters(self.model)
            if save:
                self.ckpt.maybe_save()
        return self

    def bits(self):
        """Return all state as text that is equal for equal bits."""
        state = [self.model.state_dict(), self.opt.state_dict(), self.sched.state_dict(), self.mean.state_dict()]
        return repr([torch.get_rng_state().tolist(), [plain(part) for part in state]])


@pytest.mark.parametrize("save", [False, True], ids=["attached only", "with maybe_save"])
@pytest.mark.parametrize("kept", [1, 2, 3])
def test_a_job_that_goes_on_from_any_step_ends_with_the_same_bits(tmp_path, save, kept):
    whole = Job(tmp_path / "never", 100).run(5)
    first = Job(tmp_path / "a", kept).run(kept, save=save)
    first.ckpt.close()
    second = Job(tmp_path / "a", 100)

    report = second.ckpt.restore()
    second.run(5 - kept, save=save)

    assert report.step == kept
    assert second.bits() == whole.bits()


def test_a_checkpoint_holds_the_state_at_the_end_of_its_step_and_not_of_a_later_one(tmp_path):
    job = Job(tmp_path, 1).run(1)
    at_end = job.bits()
    job.ckpt.wait()
    job.run(1)  # the image of step 1 is filled already, that of step 2 is another one
    job.ckpt.close()
    again = Job(tmp_path)

    with pytest.warns(UserWarning, match="step 2 is newer"):
        again.ckpt.restore(1)

    assert again.bits() == at_end


def test_stock_dcp_loads_what_is_saved_under_the_names_of_the_state_dicts(tmp_path):
    job = Job(tmp_path).run(3)
    job.ckpt.close()
    target = {"model": {key: torch.zeros_like(value) for key, value in job.model.state_dict().items()}}
    target["opt"] = {"state": {0: {"exp_avg": torch.zeros(8, 4)}}}

    dcp.load(target, checkpoint_id=tmp_path / "step-3")

    assert all(torch.equal(target["model"][key], value) for key, value in job.model.state_dict().items())
    assert torch.equal(target["opt"]["state"][0]["exp_avg"], job.opt.state_dict()["state"][0]["exp_avg"])


def test_a_state_that_changes_its_shape_between_saves_is_laid_out_anew(tmp_path):
    model = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.ones(3))})
    with headway.Checkpointer(tmp_path, model=model) as ckpt:
        ckpt.save(1, block="durable")
        model["w"] = torch.nn.Parameter(torch.full((5, 2), 2.0, dtype=torch.bfloat16))
        model["v"] = torch.nn.Parameter(torch.ones(100_000))
        ckpt.save(2, block="durable")
        model["w"].data.zero_()
        ckpt.restore(2)

    assert torch.equal(model["w"].data, torch.full((5, 2), 2.0, dtype=torch.bfloat16))


class Notes:
    """An object whose pickle grows."""

    def __init__(self):
        self.text = "a"

    def state_dict(self):
        return {"text": self.text}

    def load_state_dict(self, state):
        self.text = state["text"]


def test_objects_that_outgrow_their_room_get_more_and_tensors_keep_their_elements(tmp_path):
    notes, model = Notes(), torch.nn.Linear(3, 3)
    with headway.Checkpointer(tmp_path, notes=notes, model=model) as ckpt:
        ckpt.save(1, block="durable")
        notes.text = "b" * 1_000_000
        kept = model.weight.detach().clone()
        ckpt.save(2, block="durable")
        notes.text = ""
        model.weight.data.zero_()
        ckpt.restore()

    assert (len(notes.text), torch.equal(model.weight, kept)) == (1_000_000, True)


def test_old_checkpoints_go_once_newer_ones_stand(tmp_path):
    job = Job(tmp_path, 1, keep=Keep(last=2, every=3)).run(8)
    job.ckpt.close()

    assert [entry.step for entry in committed(tmp_path)] == [3, 6, 7, 8]


def test_without_a_checkpoint_nothing_changes(tmp_path):
    job = Job(tmp_path / "nowhere")
    before = job.bits()

    assert (job.ckpt.restore().step, job.bits()) == (None, before)
    with pytest.raises(InputError, match=r"no checkpoint of step 4; there are: none"):
        job.ckpt.restore(4)


def test_a_damaged_newest_checkpoint_is_passed_over_and_named(tmp_path):
    job = Job(tmp_path, 1).run(2)
    job.ckpt.close()
    flip(tmp_path / "step-2" / "rank-0" / "__0_0.distcp", 700)

    again = Job(tmp_path, 1)
    report = again.ckpt.restore()

    assert report.step == 1
    assert "step 2" in report.skipped[0]
    assert "model." in report.skipped[0]
    with pytest.raises(DamageError, match=r"__0_0.distcp"):
        again.ckpt.restore(2)
    again.run(1)  # step 2 again: the damaged one gives way
    again.ckpt.close()
    assert Job(tmp_path).ckpt.restore().step == 2


@pytest.mark.filterwarnings("ignore:the checkpoint of step 1 is committed, but its retention failed")
def test_what_fails_in_the_background_is_raised_by_whoever_waits_for_it(tmp_path):
    root = tmp_path / "root"
    job = Job(root, 1000)
    ticket = job.ckpt.save(1)
    ticket.result()
    root.joinpath(".step-2.x.draft").write_text("")  # a file in the way of nothing
    root.rename(tmp_path / "away")
    root.write_text("a file where the folder was")

    ticket = job.ckpt.save(2)
    with pytest.raises(BackgroundError, match=r"step 2 was not written: .*older checkpoints stand"):
        ticket.result(20)
    root.unlink()
    (tmp_path / "away").rename(root)
    job.ckpt.maybe_save()  # tidying up behind the commit of step 1 may have met the file, too: a warning

    assert job.ckpt.save(3, block="durable").result().step == 3
    job.ckpt.close()


class Spoilt:
    """A checkpointer whose root is a file at times."""

    def __init__(self, folder, **options):
        self.root, self.away = folder / "root", folder / "away"
        self.ckpt = headway.Checkpointer(self.root, model=torch.nn.Linear(2, 2), **options)
        self.save(1)

    def save(self, step):
        ticket = self.ckpt.save(step)
        while not ticket.done():
            time.sleep(0.01)

    def spoil(self):
        self.root.rename(self.away)
        self.root.write_text("a file where the folder was")

    def mend(self):
        self.root.unlink()
        self.away.rename(self.root)


def test_training_goes_on_while_saves_fail_until_three_in_a_row_over_ten_minutes(tmp_path, monkeypatch):
    job = Spoilt(tmp_path)
    job.spoil()
    job.save(2)
    with pytest.warns(RuntimeWarning, match=r"step 2 was not written.*the next save tries again"):
        job.save(3)
    job.mend()
    with pytest.warns(RuntimeWarning, match="step 3 was not written"):
        job.save(4)  # is committed: they are counted anew
    job.spoil()
    job.save(5)
    for step in (6, 7, 8):
        with pytest.warns(
            RuntimeWarning, match=rf"step {step - 1} was not written.*{step - 5} of 3: 3 in a row over 10 minutes"
        ):
            job.save(step)

    monkeypatch.setattr("headway.checkpoint.saves.tickets.FAILING_S", 0.0)
    with pytest.raises(BackgroundError, match=r"step 8 was not written.*The newest checkpoint is .*step-4"):
        job.save(9)
    job.mend()
    assert job.ckpt.save(10, block="durable").result().step == 10
    job.ckpt.close()


def test_a_failed_save_is_raised_at_the_next_one_where_that_is_asked_for(tmp_path):
    job = Spoilt(tmp_path, on_error="raise")
    job.spoil()
    job.save(2)

    with pytest.raises(BackgroundError, match="step 2 was not written"):
        job.save(3)
    job.mend()
    job.ckpt.close()


def test_a_failure_that_nobody_waited_for_is_raised_once(tmp_path):
    taken = tmp_path / "step-1"
    taken.mkdir()
    (taken / ".metadata").write_bytes(b"somebody else's")
    job = Job(tmp_path, 1000)
    job.ckpt.save(1)

    with pytest.raises(BackgroundError, match=r"step 1 was not written"):
        job.ckpt.wait()
    job.ckpt.wait()
    job.ckpt.close()


def test_an_agent_that_is_killed_is_replaced_and_the_save_goes_on(tmp_path):
    job = Job(tmp_path, 1000)
    job.ckpt.save(1, block="durable")
    link = job.ckpt._saver.link
    dead = link.pid
    os.kill(dead, signal.SIGSTOP)
    ticket = job.ckpt.save(2)
    os.kill(dead, signal.SIGKILL)

    with pytest.warns(RuntimeWarning, match=r"killed by signal 9; another one takes over 1 unfinished"):
        commit = ticket.result(30)

    assert (commit.step, link.pid != dead) == (2, True)
    job.ckpt.close()
    assert Job(tmp_path).ckpt.restore().step == 2


def test_an_agent_that_always_dies_fails_the_save(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_CKPT_RATE_MB_S", "nonsense")
    job = Job(tmp_path, 1000)
    ticket = job.ckpt.save(1)

    warnings.simplefilter("ignore", RuntimeWarning)
    with pytest.raises(BackgroundError, match=r"3 agents in a row died over it"):
        ticket.result(30)
    job.ckpt.close()


def test_a_save_inside_of_forward_or_backward_is_refused(tmp_path):
    ckpt = headway.Checkpointer(tmp_path, model=torch.nn.Linear(2, 2))

    class Saves(torch.nn.Module):
        def forward(self, x):
            ckpt.save(1)
            return x

    weight = torch.ones(1, requires_grad=True)
    weight.register_hook(lambda grad: ckpt.save(1) and None)

    with pytest.raises(InputError, match=r"inside of forward.*between steps"):
        Saves()(1)
    with pytest.raises(InputError, match=r"inside of backward"):
        (weight * 2).sum().backward()


def test_a_forked_child_leaves_the_parents_checkpoints_alone(tmp_path):
    job = Job(tmp_path, 1)
    job.run(1)

    def save():
        job.run(1)  # its own copy of the model may step: nothing is saved of it
        with pytest.raises(HeadwayError):
            job.ckpt.save(5)

    assert in_fork(save) == 0
    job.ckpt.close()
    assert [entry.step for entry in committed(tmp_path)] == [1]


def test_a_process_that_ends_without_close_leaves_its_last_save_whole(tmp_path):
    def save():
        atexit._clear()  # pytest's own
        headway.Checkpointer(tmp_path, model=torch.nn.Linear(300, 300)).save(4)
        atexit._run_exitfuncs()

    assert in_fork(save) == 0
    assert [entry.step for entry in wait_for(lambda: committed(tmp_path), 20)] == [4]


def test_the_policy_hears_of_every_step_what_it_took_and_what_saves_cost(tmp_path):
    job = Job(tmp_path, 2)
    policy = job.ckpt._policy
    job.run(6)
    job.ckpt.close()

    assert len(policy.seen) == 5
    assert [timing.saved for timing in policy.seen] == [False, True, False, True, False]
    assert all(0 <= timing.stall_s <= timing.step_s for timing in policy.seen)
    assert all(timing.in_flight for timing in policy.seen if timing.saved)


def test_the_interval_of_the_default_policy_is_followed(tmp_path):
    model = torch.nn.Linear(2, 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = CheckpointPolicy()
    with headway.Checkpointer(tmp_path, model=model, opt=opt, policy=policy, keep=Keep(last=99)) as ckpt:
        saved = [step for step in range(1, 31) if ckpt.maybe_save(step) is not None]

    assert saved[0] == 10
    assert [entry.step for entry in committed(tmp_path)] == saved


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"nothing to save. Pass objects by name"),
        ({"model": 3}, r"'model' is a int, without state_dict"),
        ({"objects": {"a.b": torch.nn.Linear(1, 1)}}, r"'a.b' cannot name an object"),
        ({"headway_rng": torch.nn.Linear(1, 1)}, r"cannot name an object"),
        ({"model": torch.nn.Linear(1, 1), "inflight": 0}, r"inflight is 0.*Pass 1 or more"),
        ({"model": torch.nn.Linear(1, 1), "inflight": "2"}, r"inflight is '2'"),
        ({"model": torch.nn.Linear(1, 1), "redundancy": "no"}, r"the redundancy 'no' is none"),
        ({"model": torch.nn.Linear(1, 1), "redundancy": None}, r"redundancy is None; pass text"),
        ({"model": torch.nn.Linear(1, 1), "keep": 3}, r"keep is 3. Pass a headway.checkpoint.Keep"),
        ({"model": torch.nn.Linear(1, 1), "policy": "goodput"}, r"policy is 'goodput'. Pass a headway"),
        ({"loader": torch.utils.data.DataLoader([1])}, r"'loader' is a DataLoader.*such as headway.data.DataLoader"),
        ({"model": torch.nn.Linear(1, 1), "verify": "reed"}, r"unknown verify 'reed'. Did you mean 'read'"),
        ({"model": torch.nn.Linear(1, 1), "device_snapshot": "hots"}, r"Did you mean 'host'"),
    ],
)
def test_arguments_that_cannot_be_are_refused(tmp_path, options, message):
    with pytest.raises(InputError, match=message):
        headway.Checkpointer(tmp_path, **options)


def test_calls_that_cannot_be_are_refused(tmp_path):
    ckpt = headway.Checkpointer(tmp_path, model=torch.nn.Linear(1, 1))
    for call, message in (
        (lambda: ckpt.save(-1), r"step is -1"),
        (lambda: ckpt.save(1 << 63), r"step is 9223372036854775808; pass .* from 0 to"),
        (lambda: ckpt.save(1, block="durably"), r"unknown block 'durably'"),
        (lambda: ckpt.attach(torch.nn.Linear(1, 1)), r"is no torch optimizer"),
        (lambda: ckpt.close() or ckpt.save(1), r"is closed. Make a new one"),
    ):
        with pytest.raises(InputError, match=message):
            call()


def test_a_root_that_is_a_file_or_a_checkpoint_is_refused_with_the_folder_to_name(tmp_path):
    model = torch.nn.Linear(1, 1)
    saved = tmp_path / "model.pt"
    torch.save(model.state_dict(), saved)
    with headway.Checkpointer(tmp_path, model=model) as ckpt:
        ckpt.save(3, block="durable")

    with pytest.raises(InputError, match=r"model\.pt is a file;.*headway ckpt import"):
        headway.Checkpointer(saved, model=model).restore()
    with pytest.raises(InputError, match=rf"is a checkpoint itself;.*Pass {tmp_path}, and restore\(step=3\)"):
        headway.Checkpointer(tmp_path / "step-3", model=model).restore()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"n": 1, "deep": {"f": lambda: 1}}, r"'holder\.deep\.f' cannot be stored"),
        ({"w": torch.zeros(1, dtype=torch.uint8).expand(1 << 50)}, r"a snapshot takes 1\.1 PB of host memory, and"),
    ],
)
def test_state_that_cannot_be_stored_is_refused_before_memory_is_taken(tmp_path, state, message):
    class Holder:
        def state_dict(self):
            return state

        def load_state_dict(self, state):
            raise AssertionError("nothing was saved")

    ckpt = headway.Checkpointer(tmp_path, holder=Holder())
    with pytest.raises(HeadwayError, match=message):
        ckpt.save(1)
    ckpt.close()
    assert committed(tmp_path) == []


def test_waiting_for_a_save_is_booked_to_the_checkpoint(tmp_path, monkeypatch):
    booked = []
    monkeypatch.setattr(saver.state_account, "waited", lambda start, end, *, step: booked.append((start, end, step)))
    with headway.Checkpointer(tmp_path, model=torch.nn.Linear(64, 64)) as ckpt:
        begun_ns = time.perf_counter_ns()
        ticket = ckpt.save(1, block="durable")
        waited_ns = time.perf_counter_ns() - begun_ns - ticket.blocked_s * 1e9

    ours = [(start, end) for start, end, step in booked if step == 1]
    assert sum(end - start for start, end in ours) >= 0.9 * waited_ns
    assert all(earlier[1] <= later[0] for earlier, later in pairwise(ours))


def test_while_a_graph_is_captured_nothing_is_begun_and_later_snapshots_are_waited_for_at_once(tmp_path, monkeypatch):
    """What is captured would hold our copies, and its replays update parameters without a call of our hooks."""
    calls = []
    for name in ("copy", "fence", "is_ready", "wait"):
        original = getattr(Snapshot, name)

        def noted(self, *args, name=name, original=original, **named):
            calls.append(name)
            return original(self, *args, **named)

        monkeypatch.setattr(Snapshot, name, noted)
    job = Job(tmp_path).run(2)
    job.ckpt.wait()
    parameter = next(job.model.parameters())
    assert job.ckpt._saver.settled(parameter)
    calls.clear()
    with monkeypatch.context() as patched:
        patched.setattr("headway.checkpoint.engine.capturing", lambda: True)
        job.run(3, save=True)
        with pytest.raises(InputError, match="while a graph is captured"):
            job.ckpt.save()
        assert calls == []
    job.run(1)
    job.ckpt.close()

    assert calls
    assert not job.ckpt._saver.settled(parameter)
