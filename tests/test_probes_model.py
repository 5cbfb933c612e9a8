"""Probes of modules and gradients: outermost calls only, on the training thread, and nothing else changes."""

import copy
import io
import os
import threading
import time

import pytest
import torch
from torch.func import functional_call, grad_and_value, vmap

from headway.runtime.calls import probe_model
from headway.runtime.script.gradients import CYCLES, FORWARDS
from tests.datasets import Sized
from tests.recorded import recording, rows, with_and_without

ENABLED, TRAINING = 1, 2


def model_of(*layers):
    """Return a small model, always the same."""
    torch.manual_seed(0)
    return torch.nn.Sequential(*(layers or (torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))))


def numbers(folder, name):
    """Return the first two numbers of each record of one name."""
    return [(row["a"], row["b"]) for row in rows(folder).get(name, [])]


def test_only_outermost_calls_are_recorded_with_model_gradients_and_mode(tmp_path):
    with recording(tmp_path):
        model, teacher = model_of(), model_of().requires_grad_(False)
        wrapped = torch.nn.Sequential(model)  # shares its first trainable parameter: the same model
        model(torch.ones(2, 4))
        model.eval()
        with torch.no_grad():
            teacher(torch.ones(2, 4))
            wrapped(torch.ones(2, 4))
        model.train()

    assert numbers(tmp_path, "forward") == [(0, ENABLED + TRAINING), (-1, TRAINING), (0, TRAINING)]
    assert numbers(tmp_path, "mode") == [(0, 0), (0, 1)]


def test_a_model_that_gives_groups_for_its_optimizer_as_parameters_is_recorded(tmp_path, capsys):
    class Grouped(torch.nn.Linear):
        def parameters(self):
            return [{"params": [self.weight], "lr": 0.1}, {"params": [self.bias]}]

    with recording(tmp_path):
        Grouped(4, 2)(torch.ones(2, 4))

    assert numbers(tmp_path, "forward") == [(0, ENABLED + TRAINING)]
    assert "not recorded" not in capsys.readouterr().err


def test_modules_that_a_dataset_calls_are_transforms_and_no_forwards(tmp_path):
    scale, model = torch.nn.LayerNorm(3), torch.nn.Linear(3, 2)

    class Scaled(Sized):
        size = 4

        def __getitem__(self, index):
            return scale(torch.full((3,), float(index)))

    with recording(tmp_path):
        for batch in torch.utils.data.DataLoader(Scaled(), 2):
            model(batch.detach()).sum().backward()

    assert len(numbers(tmp_path, "forward")) == 2


def test_a_forked_child_writes_nothing_of_the_forward_that_its_parent_has_not_written_yet(tmp_path):
    with recording(tmp_path):
        model = model_of()
        model(torch.ones(2, 4))
        child = os.fork()
        if not child:
            with torch.no_grad():
                model(torch.ones(2, 4))
            os._exit(0)
        os.waitpid(child, 0)
    found = rows(tmp_path)["forward"]

    assert sorted((row["pid"] == child, row["b"]) for row in found) == [(False, ENABLED + TRAINING), (True, TRAINING)]


def test_what_a_backward_computes_again_is_no_forward(tmp_path):
    from torch.utils.checkpoint import checkpoint

    with recording(tmp_path):
        model = model_of()
        x = torch.ones(2, 4, requires_grad=True)
        for reentrant in (True, False):
            checkpoint(model, x, use_reentrant=reentrant).sum().backward()

    assert len(numbers(tmp_path, "forward")) == 2


def test_other_threads_do_not_hide_the_forwards_of_the_one_that_trains(tmp_path):
    inside, done = threading.Event(), threading.Event()

    class Waits(torch.nn.Module):
        def forward(self, x):
            inside.set()
            done.wait(20)
            return x

    with recording(tmp_path):
        model = model_of()
        model(torch.ones(2, 4)).sum().backward()
        actor = threading.Thread(target=Waits(), args=(torch.ones(1),))
        actor.start()
        assert inside.wait(20)
        model(torch.ones(2, 4)).sum().backward()
        done.set()
        actor.join()

    assert numbers(tmp_path, "forward") == [(0, ENABLED + TRAINING)] * 2


def test_cpu_time_between_forwards_is_read_once_long_times_were_seen_there(tmp_path, monkeypatch):
    clock_ns = [time.perf_counter_ns()]  # the host's own would add a long time wherever another process ran

    def now():
        clock_ns[0] += 1000
        return clock_ns[0]

    monkeypatch.setattr(probe_model, "now", now)
    with recording(tmp_path):
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for wait_ns in (0, 2_000_000, 2_000_000):
            for _ in range(3):
                loss = model(torch.ones(2, 4)).sum()
                clock_ns[0] += wait_ns
            loss.backward()
            optimizer.step()

    read = [row["c"] >= 0 for row in rows(tmp_path)["forward"]]
    assert read == [False] * 5 + [True] + [False, True, True]


def test_a_model_is_described_as_it_trains_and_not_as_a_constructor_or_an_evaluation_calls_it(tmp_path):
    with recording(tmp_path) as session:
        model = model_of()
        model[0](torch.zeros(1, 4))  # as a constructor asks for shapes
        with torch.no_grad():
            model(torch.zeros(2, 4))
        for _ in range(2):
            model(torch.ones(7, 4)).sum().backward()
        rows = session.probes.tables["compute"]["models"]

    assert [(row["name"], row["num_elements"], row["batch_size"]) for row in rows] == [("Sequential", 25, 7)]


def test_a_forward_that_fails_leaves_the_next_one_recorded(tmp_path):
    with recording(tmp_path):
        model = model_of()
        with pytest.raises(RuntimeError):
            model(torch.ones(2, 5))
        model(torch.ones(2, 4))

    assert len(numbers(tmp_path, "forward")) == 1


def test_copies_pickles_scripts_traces_and_transforms_of_modules_work_as_before(tmp_path):
    def run():
        model, x = model_of(), torch.ones(2, 4)
        buffer = io.BytesIO()
        torch.save(copy.deepcopy(model), buffer)
        buffer.seek(0)
        parameters = dict(model.named_parameters())
        gradient, value = grad_and_value(lambda p: functional_call(model, p, (x,)).sum())(parameters)
        results = [
            torch.load(buffer, weights_only=False)(x), torch.jit.script(model)(x), torch.jit.trace(model, x)(x),
            torch.fx.symbolic_trace(model)(x), torch.export.export(model, (x,)).module()(x), vmap(model)(x), value,
            *gradient.values(),
        ]  # fmt: skip
        assert not [name for name in vars(model) if "headway" in name]
        assert not model._forward_hooks
        assert not model._forward_pre_hooks
        return [part.tolist() for part in results], str(torch.fx.symbolic_trace(model).graph)

    plain, recorded = with_and_without(run, tmp_path)

    assert recorded == plain


def test_a_model_whose_first_call_is_traced_has_nothing_of_headway_in_its_graph(tmp_path):
    class Pooled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution, self.pool = torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1)

        def forward(self, x):
            x = self.pool(self.convolution(x))
            return x.view(x.size(0), -1)

    def run():
        traced = torch.jit.trace(Pooled(), torch.ones(1, 3, 8, 8))  # it traces twice, and compares
        return [node.kind() for node in traced.inlined_graph.nodes()]

    plain, recorded = with_and_without(run, tmp_path)

    assert recorded == plain


@pytest.mark.slow
def test_a_compiled_model_is_one_graph_and_its_calls_are_seen(tmp_path):
    def run():
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = model_of()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        inner = torch.compile(lambda x: model(x).sin(), fullgraph=True, backend="aot_eager")
        losses = []
        for _ in range(4):
            loss = compiled(torch.ones(2, 4)).sum() + inner(torch.ones(2, 4)).sum()
            loss.backward()
            losses.append(loss.item())
        stats = torch._dynamo.utils.counters
        return losses, sum(stats["graph_break"].values()), stats["stats"]["unique_graphs"]

    plain, recorded = with_and_without(run, tmp_path)
    torch._dynamo.reset()

    assert recorded == plain
    assert numbers(tmp_path, "forward").count((0, ENABLED + TRAINING)) == 4


def test_a_gradient_inside_of_a_compiled_function_stays_in_its_graph(tmp_path):
    def run():
        torch._dynamo.reset()

        @torch.compile(fullgraph=True, backend="eager")
        def slope(x):
            return torch.func.grad(lambda y: (y * y).sum())(x)

        return slope(torch.ones(3)).tolist()

    plain = run()
    with recording(tmp_path):
        assert run() == plain == [2.0] * 3
    torch._dynamo.reset()


def test_gradients_without_a_backward_are_recorded_once_each(tmp_path):
    with recording(tmp_path):
        for _ in range(3):
            x = torch.ones(3, requires_grad=True)
            torch.autograd.grad((x * x).sum(), x)
            torch.func.grad(lambda y: (y * y).sum())(torch.ones(3))

    assert [kind for kind, _ in numbers(tmp_path, "segment.grad")] == [0, 1] * 3


@pytest.mark.parametrize("reset", ["none", "zero", "other"])
def test_fresh_gradients_are_told_from_accumulated_ones(reset, tmp_path):
    with recording(tmp_path):
        model = model_of()
        for step in range(12):
            if step % 3 == 0:
                for parameter in model.parameters():
                    if reset == "other":
                        parameter.grad = torch.zeros_like(parameter)
                model.zero_grad(set_to_none=reset == "none")
            model(torch.ones(2, 4)).sum().backward()
            if step % 3 == 2:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter -= 0.1 * parameter.grad

    assert [row["c"] for row in rows(tmp_path)["segment.backward"]] == [1, 0, 0] * 4


def test_leaves_without_a_module_are_watched_by_their_graph(tmp_path):
    with recording(tmp_path):
        weight = torch.ones(3, requires_grad=True)
        for step in range(6):
            if step % 2 == 0:
                weight.grad = None
            (weight * 2).sin().sum().backward()

    assert [row["c"] for row in rows(tmp_path)["segment.backward"]] == [1, 0] * 3


def test_a_closure_is_recorded_apart_and_returns_what_it_returned(tmp_path):
    def run():
        model = model_of()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

        def closure():
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4)).square().sum()
            loss.backward()
            return loss

        return [optimizer.step(closure).item(), optimizer.step(closure=closure).item()]

    plain, recorded = with_and_without(run, tmp_path)
    found = rows(tmp_path)

    assert recorded == plain
    assert len(found["optimizer.closure"]) == len(found["forward"]) >= 4
    assert sum(row["duration_ns"] for row in found["optimizer.closure"]) <= sum(
        row["duration_ns"] for row in found["optimizer.step"]
    )


def heard(session, seen):
    """Have a list of the probes' wakes filled."""
    session.probes.listeners.append(lambda index: seen.append(index) or 1)
    session.probes.due[0] = 0


def test_listeners_wake_at_backwards_and_at_forwards_where_no_optimizer_steps(tmp_path):
    backwards, forwards = [], []
    with recording(tmp_path) as session:
        heard(session, backwards)
        model = model_of()
        for _ in range(10):
            model.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
    with recording(tmp_path / "second") as session:
        heard(session, forwards)
        with torch.inference_mode():
            for _ in range(FORWARDS + 5):
                model(torch.ones(2, 4))

    assert backwards == [-1] * (10 - CYCLES)
    assert forwards == [-2] * 5


def test_an_update_before_the_first_gradient_is_no_step_yet(tmp_path):
    seen = []
    with recording(tmp_path) as session:
        heard(session, seen)
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.step()
        assert (seen, session.probes.steps) == ([], [0])
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.step()  # without a gradient of its own

    assert seen == [0] * 3


def test_timers_that_are_off_leave_modules_as_they_are_and_count_every_update(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_TIMERS", "off")
    before = torch.nn.Module.__call__
    with recording(tmp_path) as session:
        assert torch.nn.Module.__call__ is before
        optimizer = torch.optim.SGD(model_of().parameters(), lr=0.1)
        optimizer.step()
        assert session.probes.steps == [1]
    assert torch.nn.Module.__call__ is before
