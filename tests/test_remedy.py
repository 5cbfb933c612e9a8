"""Remedies inside a rank: resolved by name, applied or refused with a reason, undone, and results unchanged."""

import gc
import json
import logging
import os
import signal
import threading
import time
import weakref

import pytest
import torch

from headway.catalog import REMEDIES
from headway.core.errors import InputError
from headway.core.files.planfile import PlanFile, Remedy, write_plan
from headway.core.remedies import RemedyRecord
from headway.host.apply import LogBuffer, frozen_arguments, rss_bytes
from headway.runtime.in_rank.remedy import Applied, Context, RefusedRemedy, apply_one
from tests.recorded import recording, rows, run_script
from tests.remedy_context import apply


@pytest.fixture
def context(tmp_path):
    """A context in a recorded process; what a remedy patched is undone at the end."""
    with recording(tmp_path / "run") as session:
        made = Context(session.probes)
        try:
            yield made
        finally:
            for undo in reversed(made.undos):
                undo()


def planned(tmp_path, *remedies):
    """Write a plan; returns the environment that applies it."""
    write_plan(PlanFile(tuple(remedies)), tmp_path / "plan.json")
    return {"HEADWAY_PLAN": str(tmp_path / "plan.json"), "HEADWAY_REMEDIES": json.dumps(REMEDIES)}


def outcomes(tmp_path, rank=0):
    """Return name -> entry of RUN/applied."""
    content = json.loads((tmp_path / "run" / "applied" / f"r{rank}.json").read_text())
    return {entry["name"]: entry for entry in content["remedies"]}


@pytest.mark.parametrize(
    ("name", "parameters", "reason"),
    [
        ("host.gc", {"every_steps": 0}, "every_steps of host.gc is 0; it must be a whole number from 1 upwards"),
        ("host.gc", {"every_steps": "often"}, "every_steps of host.gc is 'often'"),
        ("host.logging", {"queue": -1}, "queue of host.logging is -1"),
        ("comm.bucket", {}, "bucket_mb of comm.bucket is missing; it must be a number above 0"),
        ("comm.bucket", {"bucket_mb": float("nan")}, "bucket_mb of comm.bucket is nan"),
        ("comm.buckets", {"bucket_mb": 1}, "Did you mean 'comm.bucket'"),
    ],
)
def test_a_remedy_that_cannot_be_applied_is_refused_with_its_reason(name, parameters, reason, context):
    outcome = apply_one(Remedy(name, parameters), REMEDIES, context)

    assert isinstance(outcome, RefusedRemedy)
    assert reason in outcome.reason
    assert context.undos == []


def test_a_remedy_that_breaks_half_way_is_undone_and_refused(context):
    import tests.test_remedy as here

    before = torch.serialization.save
    outcome = apply_one(Remedy("test.half", {}), {"test.half": f"{here.__name__}:RECORDS"}, context)

    assert outcome == RefusedRemedy("test.half", "KeyError: 'missing'")
    assert torch.serialization.save is before


def half_way(parameters, context):
    """Patch something, then fail."""
    context.patch("torch.serialization:save", lambda original: lambda *a, **k: original(*a, **k))
    return Applied("test.half", {"x": {}["missing"]})


RECORDS = (
    RemedyRecord("test.half", apply=f"{__name__}:half_way"),
    RemedyRecord("test.odd", apply=f"{__name__}:returns_nothing"),
    RemedyRecord("test.lossy", apply=f"{__name__}:half_way", allow="lossy", changes="it changes results"),
)


def test_of_two_remedies_that_conflict_the_later_one_is_refused(context):
    context.outcomes.append(Applied("fault.guard"))
    outcome = apply_one(Remedy("model.tune", {}, allow="lossy"), REMEDIES, context)

    assert outcome == RefusedRemedy(
        "model.tune", "it cannot be applied beside fault.guard, which the plan has before it"
    )


def test_a_remedy_without_its_grant_is_refused_with_the_line_that_grants_it(context):
    outcome = apply_one(Remedy("test.lossy", allow="result-equivalent"), {"test.lossy": f"{__name__}:RECORDS"}, context)

    assert outcome == RefusedRemedy("test.lossy", "it changes results: grant --allow lossy")


@pytest.mark.slow
def test_gc_is_frozen_after_the_first_step_and_runs_at_agreed_steps(tmp_path):
    source = """
        import gc, torch; torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(25):
            loss = model(torch.ones(2, 4)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert gc.isenabled() and gc.get_freeze_count() < 2000  # what the script itself wants
            print(loss.item().hex())
    """
    env = planned(tmp_path, Remedy("host.gc", {"every_steps": 10}))
    (recorded,) = run_script(source, tmp_path, **env)
    (plain,) = run_script(source, tmp_path, recorded=False)
    facts = outcomes(tmp_path)["host.gc"]["facts"]
    found = rows(tmp_path / "run")
    first, last = (found["optimizer.step"][index]["start_ns"] for index in (1, -1))
    inside = [row for row in found["host.gc"] if first < row["start_ns"] < last]

    assert recorded == plain
    assert facts["collections"] == 2
    assert facts["frozen"] > 0
    assert [row["a"] for row in inside] == [2, 2]


@pytest.fixture
def unfrozen():
    """A process that has frozen nothing, as this one has what pytest collected."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.slow
@pytest.mark.usefixtures("unfrozen")
def test_gc_comes_back_when_memory_grows(context, monkeypatch):
    from headway.host import apply as runtime

    sizes = iter([0, 10, 1000])
    monkeypatch.setattr(runtime, "rss_bytes", lambda: next(sizes))
    collector = runtime.Collector(context, every=80, growth_bytes=100)
    try:
        context.probes.steps[0] = 1
        assert collector.step(0) == 1
        assert gc.get_threshold()[0] == runtime.YOUNG_OBJECTS
        context.probes.steps[0] = 10
        assert collector.step(0) == 9
        context.probes.steps[0] = 20
        collector.step(0)
        assert gc.get_threshold()[0] < runtime.YOUNG_OBJECTS
        assert gc.get_freeze_count() < runtime.MOST_IMMORTAL
    finally:
        collector.undo()

    assert collector.facts["guard"] is True
    assert rss_bytes() > 1 << 20


@pytest.mark.usefixtures("unfrozen")
def test_what_a_signals_handler_raises_in_a_collection_of_the_remedys_reaches_the_script(context):
    from headway.host.apply import Collector

    class Cycle:
        def __init__(self):
            self.itself = self

        def __del__(self):
            signal.raise_signal(signal.SIGUSR1)

    def late(*_):
        raise TimeoutError

    before, collector = signal.signal(signal.SIGUSR1, late), Collector(context, every=10, growth_bytes=1 << 30)
    try:
        Cycle()
        with pytest.raises(TimeoutError):
            collector.step(0)
        assert collector.step(0) == 1
        assert collector.facts["frozen"]
    finally:
        collector.undo()
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("unfrozen")
def test_gc_that_the_script_switched_off_is_left_alone(context):
    from headway.host.apply import MOST_IMMORTAL, Collector

    gc.disable()
    try:
        Collector(context, every=10, growth_bytes=1 << 30).step(0)
        assert gc.get_freeze_count() < MOST_IMMORTAL
    finally:
        gc.enable()

    assert isinstance(context.outcomes[-1], RefusedRemedy)
    assert "switched, frozen or debugged automatic collection itself" in context.outcomes[-1].reason


@pytest.mark.slow
@pytest.mark.usefixtures("unfrozen")
def test_a_script_that_switches_gc_itself_has_its_way_and_children_collect(context):
    from headway.host import apply as runtime

    outcome = apply(runtime.collect_together, {"every_steps": 2, "rss_growth_bytes": 1 << 40}, context)
    assert isinstance(outcome, Applied)
    collector, thresholds = context.undos[1].__self__, gc.get_threshold()
    context.probes.steps[0] = 1
    collector.step(0)
    gc.disable()
    context.probes.steps[0] = 2
    collector.step(0)
    assert (gc.isenabled(), collector.facts["collections"]) == (False, 0)
    pid = os.fork()
    if pid == 0:
        os._exit(gc.isenabled())
    assert os.waitpid(pid, 0)[1] == 0  # the script wants none, so its children have none
    gc.enable()
    node = Recorder()
    node.itself, alive = node, weakref.ref(node)
    gc.collect()  # freezes again what it looked at
    del node
    gc.collect()
    assert alive() is None
    assert gc.get_threshold() == thresholds
    gc.set_threshold(thresholds[0] + 1, *thresholds[1:])

    assert gc.get_threshold()[0] == thresholds[0] + 1
    assert "calls gc.set_threshold itself" in context.outcomes[-1].reason
    gc.set_threshold(*thresholds)


class Recorder(logging.Handler):
    """Keeps what it formats, slowly, with the thread that formatted it."""

    def __init__(self, seconds=0.0):
        super().__init__()
        self.seconds, self.lines, self.threads = seconds, [], set()

    def emit(self, record):
        time.sleep(self.seconds)
        self.lines.append(record.getMessage())
        self.threads.add(threading.get_ident())


@pytest.fixture
def logger():
    """A logger of our own with one handler that keeps lines."""
    made = logging.getLogger("tests.remedy")
    made.propagate, made.handlers = False, [Recorder()]
    made.setLevel(logging.INFO)
    return made


def buffered(context, size):
    """Return a buffer of log records that is in use."""
    buffer = LogBuffer(context.probes.emit, size)
    context.patch("logging:Logger.callHandlers", buffer.around_call_handlers)
    return buffer


def test_log_records_keep_their_order_and_none_is_dropped_by_a_full_queue(logger, context):
    buffer = buffered(context, 4)
    logger.handlers[0].seconds = 0.0005
    for index in range(200):
        logger.info("line %d", index)
    buffer.close()
    logger.info("after")

    assert logger.handlers[0].lines == [f"line {index}" for index in range(200)] + ["after"]
    assert len(logger.handlers[0].threads) == 2  # another one, and at the end this one


def test_the_caller_does_not_wait_for_a_slow_handler(logger, context):
    buffer = buffered(context, 64)
    logger.handlers[0].seconds = 0.02
    start = time.perf_counter()
    for index in range(10):
        logger.info("line %d", index)
    put_s = time.perf_counter() - start
    buffer.flush()
    flushed_s = time.perf_counter() - start
    buffer.close()

    assert flushed_s >= 0.2
    assert put_s < flushed_s / 2


def test_arguments_that_change_later_are_formatted_at_once(logger, context):
    buffer = buffered(context, 64)
    logger.handlers[0].seconds = 0.01
    values, tensor = [1], torch.zeros(1)
    logger.info("first")
    logger.info("%s %s", values, tensor)
    values.append(2)
    tensor += 5
    buffer.close()

    assert logger.handlers[0].lines[1] == "[1] tensor([0.])"
    assert not frozen_arguments((tensor,))


def test_an_error_is_written_before_the_call_returns_and_a_bad_handler_stops_nothing(logger, context, capsys):
    class Bad(logging.Handler):
        def emit(self, record):
            raise OSError("disk full")

    buffer = buffered(context, 64)
    logger.handlers.append(Bad())
    logger.info("one")
    logger.error("two")
    assert logger.handlers[0].lines == ["one", "two"]
    logger.error("three")
    buffer.close()

    assert logger.handlers[0].lines == ["one", "two", "three"]
    assert "disk full" in capsys.readouterr().err


def test_handlers_that_log_themselves_do_not_wait_for_themselves(logger, context):
    class Chatty(logging.Handler):
        def emit(self, record):
            if "nested" not in record.getMessage():
                for _ in range(9):
                    logger.error("nested")

    buffer = buffered(context, 2)
    logger.handlers.append(Chatty())
    thread = threading.Thread(target=logger.error, args=("outer",), daemon=True)
    thread.start()
    thread.join(30)

    assert not thread.is_alive()
    assert logger.handlers[0].lines == ["outer"] + ["nested"] * 9
    buffer.close()


def test_messages_and_extras_that_change_later_are_handled_as_they_were(logger, context):
    seen = []

    class Keeps(logging.Handler):
        def emit(self, record):
            seen.append((record.getMessage(), str(getattr(record, "metrics", ""))))

    buffer = buffered(context, 64)
    logger.handlers[0].seconds = 0.02
    logger.handlers.append(Keeps())
    values = {"loss": 1}
    logger.info("first")
    logger.info(values)
    logger.info("extra", extra={"metrics": values})
    values["loss"] = 2
    buffer.close()

    assert seen == [("first", ""), ("{'loss': 1}", ""), ("extra", "{'loss': 1}")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "end", ["os._exit(0)", "log.removeHandler(handler)", "os.execv('/bin/true', ['true'])", "logging.shutdown()"]
)
def test_every_record_is_written_before_the_handlers_or_the_process_go(end, tmp_path):
    source = f"""
        import logging, os, time, torch
        class Slow(logging.FileHandler):
            def emit(self, record):
                time.sleep(0.01)
                super().emit(record)
        log, handler = logging.getLogger("job"), Slow("job.log")
        log.addHandler(handler); log.setLevel("INFO")
        for i in range(20):
            log.info("line %d", i)
        {end}
    """
    run_script(source, tmp_path, **planned(tmp_path, Remedy("host.logging", {})))

    assert (tmp_path / "job.log").read_text().split("\n") == [f"line {i}" for i in range(20)] + [""]


def test_a_full_disk_under_the_run_folder_does_not_reach_the_script(context, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("headway.runtime.in_rank.remedy.write_json", full)
    context.note(Applied("comm.bucket", {}))

    assert "No space left" in context.probes.tables["patches"]["applied file"]


@pytest.mark.slow
def test_logs_of_a_whole_job_are_complete_at_exit_and_in_forked_children(tmp_path):
    source = """
        import logging, os, sys, torch
        logging.basicConfig(filename="job.log", level=logging.INFO, format="%(message)s")
        log = logging.getLogger("job")
        for index in range(300):
            log.info("line %d", index)
            if index == 150:
                pid = os.fork()
                if pid == 0:
                    log.info("child")
                    os._exit(0)
                os.waitpid(pid, 0)
        sys.exit(0)
    """
    run_script(source, tmp_path, **planned(tmp_path, Remedy("host.logging", {})))
    lines = (tmp_path / "job.log").read_text().splitlines()

    assert [line for line in lines if line != "child"] == [f"line {index}" for index in range(300)]
    assert lines[151] == "child"
    assert outcomes(tmp_path)["host.logging"]["applied"] is True


@pytest.mark.slow
def test_a_bucket_size_is_applied_on_two_ranks_with_the_same_losses(tmp_path):
    source = """
        import os, torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel
        dist.init_process_group("gloo", init_method=os.environ["STORE"])
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(6)])
        ddp = DistributedDataParallel(model, bucket_cap_mb=25)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        for step in range(4):
            x = torch.randn(4, 128, generator=torch.Generator().manual_seed(step + 10 * dist.get_rank()))
            loss = ddp(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(loss.item().hex())
        with open(f"buckets{dist.get_rank()}", "w") as file:
            file.write(str(ddp._get_ddp_logging_data()["bucket_cap_bytes"]))
        dist.destroy_process_group()
    """
    env = planned(tmp_path, Remedy("comm.bucket", {"bucket_mb": 0.1}))
    recorded = run_script(source, tmp_path, ranks=2, **env)
    small = int((tmp_path / "buckets0").read_text())
    plain = run_script(source, tmp_path, ranks=2, recorded=False)

    assert recorded == plain
    assert small == int(0.1 * 1024 * 1024)
    facts = outcomes(tmp_path, rank=1)["comm.bucket"]["facts"]
    assert (facts["models"], facts["bit_exact"]) == (1, True)


@pytest.mark.slow
def test_a_plan_that_cannot_be_read_is_one_warning_and_the_job_goes_on(tmp_path):
    (tmp_path / "plan.json").write_text("{}")
    (out,) = run_script("import torch; print('done')", tmp_path, HEADWAY_PLAN=str(tmp_path / "plan.json"))

    assert out == "done\n"
    assert (tmp_path / "stderr").read_text().count("headway: ") == 1


def test_an_unpicklable_outcome_is_refused(context):
    import tests.test_remedy as here

    outcome = apply_one(Remedy("test.odd", {}), {"test.odd": f"{here.__name__}:RECORDS"}, context)

    assert isinstance(outcome, RefusedRemedy)
    assert InputError.__name__ in outcome.reason
    assert os.environ.get("HEADWAY_PLAN") is None


def returns_nothing(parameters, context):
    """Forget to return an outcome."""


@pytest.mark.slow
@pytest.mark.parametrize("sparse", [False, True])
def test_a_hook_that_fails_is_undone_and_the_script_goes_on(sparse, tmp_path):
    source = f"""
        import torch
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Embedding(10, 4, sparse={sparse}), torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(10):
            optimizer.zero_grad()
            loss = model(torch.arange(5)).square().sum()
            loss.backward()
            optimizer.step()
            print(loss.item().hex())
    """
    measured = run_script(source, tmp_path, **planned(tmp_path, Remedy("cluster.noise", {})))
    plain = run_script(source, tmp_path, recorded=False)
    found = outcomes(tmp_path)["cluster.noise"]

    assert measured == plain
    assert found["applied"] != sparse
    assert not sparse or "a gradient is sparse" in found["reason_not_applied"]
