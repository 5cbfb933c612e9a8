"""Every step of every remedy is made to fail once: does the script still end with its own results?

Claim: for each remedy in the table, and each function of headway's that it calls in the training process, from its
application to the end of the job, an error raised at the entry of that function (at its first call, again at a later
one) leaves the script's printed results and its end as they are without the remedy. The functions are found by tracing
one run; each fault is a forked process of its own.

`GUARDS` are left out: a function that answers the failures of those that it calls cannot answer one of its own first
line. So is `headway/runtime/in_rank/guard.py`, which does the same for all functions that a remedy replaces. On the
data server counts that each example comes once in each epoch: that remedy is allowed to change the order.

`--sample N` makes fail the first N functions of each remedy and N others only: what CI runs.
"""

import argparse
import contextlib
import faulthandler
import io
import json
import logging
import os
import random
import select
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.utils.data import DataLoader, Dataset

from headway.catalog import REMEDIES
from headway.core.files.planfile import Remedy
from headway.data.guard.decisions import Budget
from headway.runtime.in_rank.remedy import Context, apply_one

ROOMS = tuple(f"/headway/{room}/" for room in ("data", "comm", "checkpoint", "host"))
GUARDS = (
    "ScriptWorkers._next_data", "ScriptThreads.__next__", "ScriptThreads._next_data", "Served.__next__",
    "Served._next_data", "Verification._around_next_data.<locals>._next_data", "Verification._tried",
    "CachedExamples.__getitem__", "CachedExamples.__getitems__", "async_save.<locals>.write",
)  # fmt: skip
"""Functions that only answer the failures of others: an iterator's and a dataset's methods, and a thread's function."""

HANG_S = 60.0
LATER = 7
"""Which call fails the second time round."""


class Squares(Dataset):
    """Examples that take a while to read."""

    def __len__(self):
        return 48

    def __getitem__(self, index):
        time.sleep(0.0005)
        return torch.full((4,), float(index)), torch.tensor(float(index) ** 2)


def learner():
    """Return a model and its optimizer, always the same."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), lr=1e-6)


def fit(model, optimizer, batches):
    """Train one epoch and print the losses."""
    for inputs, targets in batches:
        loss = (model(inputs).squeeze(-1) - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item())


def reads(num_workers=0):
    """Three epochs over a shuffled loader."""
    model, optimizer = learner()
    loader = DataLoader(Squares(), batch_size=4, shuffle=True, num_workers=num_workers)
    for _ in range(3):
        fit(model, optimizer, loader)
    print(torch.rand(1).item())


def orders():
    """Three epochs, of which what counts is that each example comes once."""
    model, optimizer = learner()
    loader = DataLoader(Squares(), batch_size=4, shuffle=True)
    for _ in range(3):
        seen = []
        for inputs, targets in loader:
            model(inputs).sum().backward()
            optimizer.step()
            seen += zip(inputs[:, 0].tolist(), targets.tolist(), strict=True)
        print(sorted(seen))


def saves():
    """Checkpoints of an unmodified script."""
    model, optimizer = learner()
    with tempfile.TemporaryDirectory() as folder:
        for epoch in range(3):
            fit(model, optimizer, [(torch.ones(4, 4), torch.ones(4))] * 4)
            dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/{epoch}")
        state = {"model": {name: torch.zeros_like(value) for name, value in model.state_dict().items()}}
        dcp.load(state, checkpoint_id=f"{folder}/2")
        print(state["model"]["weight"].tolist())


def logs():
    """A script that logs."""
    model, optimizer = learner()
    log, text = logging.getLogger("job"), io.StringIO()
    log.propagate = False
    log.addHandler(logging.StreamHandler(text))
    for step in range(20):
        fit(model, optimizer, [(torch.ones(4, 4), torch.ones(4))])
        log.warning("step %d", step)
    logging.shutdown()
    print(text.getvalue())


def many():
    """Enough steps for collections."""
    model, optimizer = learner()
    fit(model, optimizer, [(torch.ones(4, 4), torch.ones(4))] * 40)


UNENDED = []
"""Models and groups that live until their process ends. Torch's group, let go by Python, joins its thread with the
interpreter's lock held, and that thread may wait for the lock to let go of its last work: then neither goes on."""


def ranks():
    """DDP on one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    fit(model, optimizer, [(torch.ones(4, 4), torch.ones(4))] * 6)
    UNENDED.append((model, dist.group.WORLD))
    dist.destroy_process_group()


def shards():
    """FSDP2 on one rank."""
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    mesh = dist.init_device_mesh("cpu", (1,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for _ in range(6):
        loss = model(torch.ones(4, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item())
    UNENDED.append((model, dist.group.WORLD))
    dist.destroy_process_group()


JOBS = {
    "data.workers": (reads, {"num_workers": 1, "persistent_workers": True}),
    "data.threads": (reads, {"num_workers": 2, "blocked_datasets": ["Squares"]}),
    "data.threads, own workers": (lambda: reads(1), {"num_workers": 2, "blocked_datasets": ["Squares"]}),
    "data.cache": (reads, {"bytes": 1 << 24}),
    "data.workers, verified": (reads, {"num_workers": 1}),
    "data.threads, verified": (reads, {"num_workers": 1, "blocked_datasets": ["Squares"]}),
    "data.cache, verified": (reads, {"bytes": 1 << 24}),
    "data.server": (orders, {}),
    "comm.bucket": (ranks, {"bucket_mb": 1}),
    "comm.gradient_view": (ranks, {}),
    "comm.static_graph": (ranks, {}),
    "comm.order": (shards, {"ahead": 1}),
    "checkpoint.async": (saves, {}),
    "host.gc": (many, {"every_steps": 10}),
    "host.logging": (logs, {}),
}


FAULTY = {"__name__": "headway.made_to_fail"}
"""Where the fault is raised: code of headway's own, as far as a traceback tells."""
exec("def fail():\n    raise OSError(5, 'made to fail')", FAULTY)


class Faults:
    """Follows the calls of headway's functions; the `nth` call of the function `target` raises."""

    def __init__(self, target=None, nth=1):
        self.target, self.nth, self.calls, self.names = target, nth, Counter(), {}

    def __call__(self, frame, event, _):
        code = frame.f_code
        name = self.names.get(code)
        if name is None:
            is_ours = any(room in code.co_filename for room in ROOMS)
            name = f"{code.co_filename.partition('/headway/')[2]}:{code.co_qualname}" if is_ours else ""
            self.names[code] = name
        if not name:
            return
        self.calls[name] += 1
        if name == self.target and self.calls[name] == self.nth:
            FAULTY["fail"]()
        return

    @contextlib.contextmanager
    def followed(self):
        """Follow the calls of this thread, and of those that it starts."""
        asked = sys.gettrace
        sys.gettrace = lambda: None  # type: ignore[assignment]  # else loaders are left alone: the script listens to calls
        threading.settrace(self)
        sys.settrace(self)
        try:
            yield
        finally:
            sys.gettrace = asked
            sys.settrace(None)
            threading.settrace(None)


def play(job, faults):
    """Run a job, under its remedy where there are `faults`; returns what it printed, how it ended and what was said."""
    train, parameters = JOBS[job]
    remedy, text, ended = job.partition(",")[0], io.StringIO(), "well"
    with tempfile.TemporaryDirectory() as run:
        probes = SimpleNamespace(
            recorder=SimpleNamespace(rank=0), run=run, leads=False, listeners=[], due=[0], steps=[0],
            failed=lambda *_: None, emit=lambda *_, **__: None,
        )  # fmt: skip
        shared = {"data.trials": Budget(clock=lambda: 0.0)}
        context = Context(probes, step_s=None, verify="all" if job.endswith("verified") else "", shared=shared)
        with contextlib.redirect_stdout(text), faults.followed() if faults else contextlib.nullcontext():
            try:
                if faults:
                    outcome = apply_one(
                        Remedy(
                            remedy,
                            parameters,
                            allow="data.threads" if remedy == "data.threads" else "result-equivalent",
                        ),
                        REMEDIES,
                        context,
                    )
                    context.note(outcome)
                train()
            except BaseException as error:
                import traceback

                ended = "".join(traceback.format_exception(error))
    said = [one.json() for one in context.outcomes]
    return {"printed": text.getvalue(), "ended": ended, "said": said, "calls": faults.calls if faults else {}}


def apart(job, faults):
    """Return what `play` returns, from a forked process, or None where it did not end in time, twice.

    A process that was forked may hang by itself, on a lock that another thread held: that does not come twice.
    """
    return _forked(job, faults) or _forked(job, faults)


def _forked(job, faults):
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.setpgid(0, 0)
        os.close(reader)
        faulthandler.disable()
        with open(os.devnull, "w") as null:
            os.dup2(null.fileno(), 2)
        found = play(job, faults)
        with contextlib.suppress(BaseException):
            from concurrent.futures.thread import _python_exit

            _python_exit()
        with open(writer, "w") as file:
            json.dump(found, file)
        os._exit(0)
    os.close(writer)
    with open(reader) as file:
        until, text = time.monotonic() + HANG_S, ""
        while (left := until - time.monotonic()) > 0 and select.select([file], [], [], left)[0]:
            piece = os.read(file.fileno(), 1 << 20).decode()
            if not piece:
                break
            text += piece
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return json.loads(text) if text else None


def sampled(pairs, size):
    """Return the first `size` functions of `pairs`, and `size` others."""
    others = pairs[size:]
    return pairs[:size] + random.Random(0).sample(others, min(size, len(others)))


def faults_of(job, size=None):
    """Yield (function, call, what went wrong or '') of each fault of a job."""
    plain, survey = apart(job, None), apart(job, Faults())
    assert plain is not None, job
    assert survey is not None, job
    assert survey["printed"] == plain["printed"], (job, survey["ended"])
    assert survey["said"][0]["applied"], (job, survey["said"])
    pairs = [(name, calls) for name, calls in survey["calls"].items() if name.partition(":")[2] not in GUARDS]
    for name, calls in pairs if size is None else sampled(pairs, size):
        for nth in sorted({1, min(calls, LATER)}):
            found = apart(job, Faults(name, nth))
            if found is None:
                wrong = "hung or died"
            elif found["ended"] != "well":
                wrong = found["ended"]
            else:
                wrong = "" if found["printed"] == plain["printed"] else "other results"
            yield name, nth, wrong


def main():
    """Fail everything once; print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="jobs whose names contain this")
    parser.add_argument("--show", action="store_true", help="print each fault that changed something, as it is found")
    parser.add_argument("--sample", type=int, help="make so many functions fail that come first, and so many others")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(io.StringIO()):
        logs()  # what torch imports late, it imports here
    counts, bad = {}, []
    for job in JOBS:
        if options.only and options.only not in job:
            continue
        found = list(faults_of(job, options.sample))
        wrong = [(name, nth, text) for name, nth, text in found if text]
        counts[job] = {"faults": len(found), "bad": len(wrong)}
        bad += [f"{job}: {name} (call {nth}): {text[-300:]}" for name, nth, text in wrong]
        if options.show:
            print(job, counts[job], *(f"{name} #{nth}: {text.strip()[-900:]}" for name, nth, text in wrong), sep="\n  ")
    print(json.dumps({"bench": "failing_remedies", "jobs": counts, "bad": bad[:10], "met": not bad}))
    return 3 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
