"""Optimizer probes: one row per step whatever the optimizer, the scaler, the scheduler or the compiler does."""

import time

import pytest
import torch

from headway.runtime.recorder import probes
from tests.recorded import recording, rows, with_and_without
from tests.training import small, train


@pytest.mark.parametrize(
    ("name", "options"),
    [("SGD", {}), ("Adam", {}), ("AdamW", {"fused": True}), ("AdamW", {"foreach": True}), ("Adagrad", {})],
)
def test_every_optimizer_is_seen_and_computes_the_same(name, options, tmp_path):
    plain = train(*small(getattr(torch.optim, name), **options), 5)
    with recording(tmp_path):
        recorded = train(*small(getattr(torch.optim, name), **options), 5)
    seen = rows(tmp_path)["optimizer.step"]

    assert recorded == plain
    assert [(row["a"], row["b"]) for row in seen] == [(0, 0)] * 5
    assert all(row["duration_ns"] > 0 for row in seen)


def test_headways_own_work_behind_a_step_is_recorded_where_it_takes_long(tmp_path, monkeypatch):
    clock = [1_000]
    with recording(tmp_path) as session, monkeypatch.context() as patch:
        patch.setattr(probes, "now", lambda: clock[0])
        for spent in (probes.OWN_NS - 1, probes.OWN_NS, 9 * probes.OWN_NS):
            session.probes.listeners[:] = [lambda _, spent=spent: clock.append(clock.pop() + spent) or 1]
            session.probes.wake(0)
    found = [(row["start_ns"], row["duration_ns"]) for row in rows(tmp_path)["host.recording"]]

    assert found == [(1_000 + probes.OWN_NS - 1, probes.OWN_NS), (1_000 + 2 * probes.OWN_NS - 1, 9 * probes.OWN_NS)]


def test_that_work_is_recorded_from_the_end_of_the_step(tmp_path):
    with recording(tmp_path) as session:
        session.probes.listeners.append(lambda _: time.sleep(2 * probes.OWN_NS / 1e9) or 1)
        train(*small(), 3)
    ends = [row["start_ns"] + row["duration_ns"] for row in rows(tmp_path)["optimizer.step"]]

    assert [row["start_ns"] for row in rows(tmp_path)["host.recording"]] == ends


def test_two_optimizers_alternate_by_number(tmp_path):
    with recording(tmp_path) as session:
        pairs = [small(), small(torch.optim.Adam)]
        for _ in range(3):
            for model, optimizer in pairs:
                train(model, optimizer, 1)
        assert session.probes.tables["optimizers"] == {"0": "SGD", "1": "Adam"}
        sizes = {str(at): sum(p.numel() for p in model.parameters()) for at, (model, _) in enumerate(pairs)}
        assert session.probes.tables["parameters"] == sizes

    assert [row["a"] for row in rows(tmp_path)["optimizer.step"]] == [0, 1] * 3


def test_an_optimizer_that_is_made_anew_for_each_step_is_one(tmp_path):
    with recording(tmp_path) as session:
        model, _ = small()
        for _ in range(5):
            train(model, torch.optim.Adam(model.parameters()), 1)
        assert session.probes.tables["optimizers"] == {"0": "Adam"}

    assert [row["a"] for row in rows(tmp_path)["optimizer.step"]] == [0] * 5


def test_a_gan_has_the_same_losses_bit_for_bit(tmp_path):
    def run():
        torch.manual_seed(0)
        generator, critic = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
        g_step, c_step = torch.optim.Adam(generator.parameters()), torch.optim.Adam(critic.parameters())
        losses = []
        for step in range(9):
            c_loss = critic(generator(torch.randn(2, 4)).detach()).mean() - critic(torch.randn(2, 4)).mean()
            c_step.zero_grad()
            c_loss.backward()
            c_step.step()
            if step % 3 == 2:
                g_loss = -critic(generator(torch.randn(2, 4))).mean()
                g_step.zero_grad()
                g_loss.backward()
                g_step.step()
                losses.append((c_loss.item(), g_loss.item()))
        return losses

    plain, recorded = with_and_without(run, tmp_path)

    assert recorded == plain
    assert [row["a"] for row in rows(tmp_path)["optimizer.step"]] == [0, 0, 0, 1] * 3


def test_an_optimizer_that_steps_another_one_is_one_step(tmp_path):
    class Outer(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            self.inner.step()

    with recording(tmp_path):
        model, outer = small(Outer)
        outer.inner = torch.optim.SGD(model.parameters(), lr=0.1)
        train(model, outer, 4)

    assert len(rows(tmp_path)["optimizer.step"]) == 4


def test_a_closure_a_scheduler_and_step_hooks_work_as_before(tmp_path):
    with recording(tmp_path):
        model, optimizer = small(torch.optim.LBFGS)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        calls = []
        optimizer.register_step_post_hook(lambda *_: calls.append(1))

        def closure():
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4)).square().sum()
            loss.backward()
            return loss

        first = optimizer.step(closure)
        scheduler.step()
        second = optimizer.step(closure)

    assert second < first
    assert calls == [1, 1]
    assert len(rows(tmp_path)["optimizer.step"]) == 2


def test_a_step_that_the_scaler_skips_counts_and_is_marked(tmp_path):
    def run():
        model, optimizer = small()
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        losses = []
        for step in range(6):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4)).square().sum() * (float("inf") if step == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append((loss.item(), scaler.get_scale()))
        return losses

    plain, recorded = with_and_without(run, tmp_path)

    assert recorded == plain
    assert [row["b"] for row in rows(tmp_path)["optimizer.step"]] == [0, 0, 1, 0, 0, 0]


def test_an_exception_in_a_step_passes_and_the_next_step_is_recorded(tmp_path):
    class Fails(torch.optim.SGD):
        fail = True

        def step(self, closure=None):
            if self.fail:
                raise KeyError("mine")
            return super().step(closure)

    with recording(tmp_path):
        model, optimizer = small(Fails)
        with pytest.raises(KeyError, match="mine"):
            optimizer.step()
        optimizer.fail = False
        train(model, optimizer, 2)

    assert len(rows(tmp_path)["optimizer.step"]) == 2


@pytest.mark.slow
def test_compiled_code_keeps_its_graphs_and_its_result(tmp_path):
    """A step inside a compiled function adds no graph break of ours, and a compiled model none at all."""

    def run():
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model, optimizer = small()
        forward = torch.compile(model, fullgraph=True, backend="eager")

        @torch.compile(backend="eager")
        def step():
            optimizer.step()

        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = forward(torch.ones(2, 4)).square().sum()
            loss.backward()
            step()
            losses.append(loss.item())
        breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
        return losses, breaks, torch._dynamo.utils.counters["stats"]["unique_graphs"]

    plain, recorded = with_and_without(run, tmp_path)
    torch._dynamo.reset()

    assert recorded == plain
    assert sum(row["duration_ns"] for row in rows(tmp_path)["host.compile"]) > 0
    assert len(rows(tmp_path)["optimizer.step"]) == 3


def test_a_session_that_ended_leaves_optimizers_working_and_unrecorded(tmp_path):
    with recording(tmp_path):
        model, optimizer = small(torch.optim.RMSprop)
        train(model, optimizer, 2)
    before = len(rows(tmp_path)["optimizer.step"])
    train(model, optimizer, 2)
    with recording(tmp_path / "second"):
        train(model, optimizer, 3)

    assert before == len(rows(tmp_path)["optimizer.step"]) == 2
    assert len(rows(tmp_path / "second")["optimizer.step"]) == 3
