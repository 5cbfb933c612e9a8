"""`headway.log_to`: the right figures reach the logger, and no logger reaches training."""

import sys
import threading
import time

import pytest
import torch

import headway
from headway.core.errors import InputError
from headway.runtime.in_rank.logger_bridge import QUEUE, LoggerBridge, writer_of
from tests.recorded import recording, run_script
from tests.spawn import in_fork
from tests.training import small, train


class Wandb:
    """A W&B run, as far as it matters here."""

    def __init__(self):
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log(self, values, step):
        self.rows.append((step, values))


class Mlflow(Wandb):
    """The mlflow module; it has a `log` of another meaning, too."""

    def log_metrics(self, values, step):
        self.rows.append((step, values))

    def log(self, *_):
        raise AssertionError("not this one")


class TensorBoard(Wandb):
    """A SummaryWriter."""

    def add_scalar(self, name, value, step):
        self.rows.append((step, {name: value}))


def trained(steps, *, wait_s=0.002):
    """Train a small model; returns its losses, bit by bit."""
    return train(*small(), (time.sleep(wait_s) or torch.ones(2, 4) for _ in headway.steps(range(steps))))


TARGETS = {"W&B": Wandb, "MLflow": Mlflow, "TensorBoard": TensorBoard}


@pytest.mark.parametrize("name", TARGETS)
def test_every_kind_of_logger_is_called_as_it_wants(name):
    target = TARGETS[name]()
    writer_of(target)({"headway/goodput": 0.5, "headway/step_s": 0.1}, 7)

    assert {step for step, _ in target.rows} == {7}
    joined = {key: value for _, values in target.rows for key, value in values.items()}
    assert joined == {"headway/goodput": 0.5, "headway/step_s": 0.1}


def test_what_is_reported_is_what_happened(tmp_path):
    target = Wandb()
    with headway.run(tmp_path / "run"):
        bridge = headway.log_to(target, every_steps=10)
        trained(60, wait_s=0.004)

    steps = [step for step, _ in target.rows]
    values = target.rows[-1][1]
    assert steps == sorted(set(steps))
    assert steps[-1] == 60
    assert 5 <= len(steps) + bridge.dropped <= 8
    assert 0.004 <= values["headway/step_s"] < 1
    assert 0 < values["headway/goodput"] <= 1
    assert "headway/lost/startup" in values
    assert all(0 <= value <= 1 for key, value in values.items() if key.startswith("headway/lost/"))
    assert (bridge.failures, bridge.recording) == (0, False)


def test_a_time_between_reports_is_kept_without_looking_at_every_step(tmp_path):
    target = Wandb()
    with recording(tmp_path) as session:
        bridge = headway.log_to(target, every_s=0.2)
        looks = []
        listener = bridge._after_step
        session.probes.listeners.remove(listener)
        session.probes.listeners.append(lambda index: looks.append(1) or listener(index))
        begun = time.perf_counter()
        trained(300, wait_s=0.003)
        elapsed = time.perf_counter() - begun
        bridge.close()

    assert 1 <= len(target.rows) <= elapsed / 0.2 + 2
    assert len(looks) < 200


def test_a_logger_that_raises_costs_one_warning_and_no_step(tmp_path, capfd):
    class Broken:
        def log(self, values, step):
            raise ConnectionError("no network")

    plain = trained(20, wait_s=0)
    with headway.run(tmp_path / "run"):
        bridge = headway.log_to(Broken(), every_steps=1)
        losses = trained(20)

    error = capfd.readouterr().err
    assert losses == plain
    assert bridge.failures > 1
    assert error.count("Broken failed, and training goes on: ConnectionError: no network") == 1
    assert error.count("headway: log_to") == 1


def test_a_logger_that_blocks_delays_no_step_and_drops_are_counted(tmp_path, capfd):
    release, entered = threading.Event(), threading.Event()

    class Stuck:
        def log(self, values, step):
            entered.set()
            release.wait(60)

    plain = trained(60, wait_s=0)
    with recording(tmp_path):
        bridge = headway.log_to(Stuck(), every_steps=1)
        trained(2)
        assert entered.wait(30)
        losses = trained(60)  # would never end if a step waited for the logger
        dropped = bridge.dropped
        release.set()
        bridge.close()

    assert losses == plain
    assert dropped >= 60 - QUEUE - 2
    assert capfd.readouterr().err.count("Stuck is too slow: reports are dropped, and training goes on") == 1


def test_the_end_of_the_recording_waits_for_a_stuck_logger_only_so_long(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("headway.runtime.in_rank.logger_bridge.LAST_S", 0.05)
    release = threading.Event()

    class Stuck:
        def log(self, values, step):
            release.wait(60)

    with headway.run(tmp_path / "run"):
        headway.log_to(Stuck(), every_steps=5)
        trained(10)
    release.set()

    assert "Stuck did not take its last reports" in capfd.readouterr().err
    assert list((tmp_path / "run" / "events").glob("*.parquet"))


def test_where_nothing_is_recorded_it_says_so_and_does_nothing(capfd):
    target = Wandb()
    bridge = headway.log_to(target)
    trained(3)
    bridge.close()

    assert "log_to reports nothing: nothing is recorded here. Use `headway run`" in capfd.readouterr().err
    assert (target.rows, bridge.recording, bridge.dropped) == ([], False, 0)


def test_before_the_script_has_imported_torch_it_says_to_be_called_later(monkeypatch, capfd, tmp_path):
    monkeypatch.setenv("HEADWAY_RUN", str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch")
    bridge = LoggerBridge(None, Wandb())

    assert not bridge.recording
    assert "nothing is recorded here yet. Call it after `import torch`" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [({"every_s": 0}, r"every_s is 0.*Pass every_s=10"), ({"every_steps": 0}, r"every_steps is 0.*must be positive")],
)
def test_an_interval_that_cannot_be_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        headway.log_to(Wandb(), **options)


def test_an_object_that_takes_no_values_is_refused():
    with pytest.raises(InputError, match=r"object has neither log, log_metrics nor add_scalar.*SummaryWriter"):
        headway.log_to(object())


def test_a_forked_child_neither_reports_nor_complains(tmp_path, capfd):
    with recording(tmp_path):
        bridge = headway.log_to(Wandb(), every_steps=1)
        trained(2)
        code = in_fork(lambda: (bridge._after_step(0), bridge.close()))
        bridge.close()

    assert code == 0
    assert "log_to" not in capfd.readouterr().err


@pytest.mark.slow
def test_it_works_in_a_rank_of_headway_run(tmp_path):
    script = """
        import headway, torch, time
        rows = []
        class Run:
            def log(self, values, step): rows.append((step, values["headway/goodput"]))
        bridge = headway.log_to(Run(), every_steps=5)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(30):
            time.sleep(0.01)
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        bridge.close()
        print(rows[-1][0], bridge.failures, 0 < rows[-1][1] <= 1)
    """
    (output,) = run_script(script, tmp_path)

    assert output.strip() == "30 0 True"
