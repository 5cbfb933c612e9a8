"""The clock of `headway bench world`: counts and times what a training script does, independently of headway's code.

It stands on PYTHONPATH of every process of a row. Without a WORLD_ variable in the environment it does
nothing. WORLD_CLOCK names a folder: each process writes <pid>.json there with

- `updates`: calls of `Optimizer.step` (torch's public hook after a step);
- `backwards`: outermost calls of `torch.autograd.backward`; `grads`: of `torch.autograd.grad`;
- `forwards`, `forward_s`: outermost module calls by "train grad", "train no_grad", "eval grad", "eval no_grad";
- `batches`, `next_s`: `next` of a DataLoader's iterator outside of an evaluation; `eval_next_s`: inside of one;
- `span_s`: seconds in the functions that WORLD_SPANS names, as {"eval": ["module:Class.method", ...], ...}; only the
  outermost span counts. Functions of the script itself are timed by `timed_script.py`.

WORLD_PACE names a file: at the end of the process, or of a rank's, it is [seconds of the mean step, seconds from the
first update to the last, updates], where steps of more than ten medians (evaluation) do not count for the mean.

WORLD_SEED seeds torch and numpy once torch is imported, for scripts that do not seed them themselves. WORLD_NUMPY_1
gives numpy the name `Inf` back, which scripts of its first major version use.
"""

import atexit
import functools
import itertools
import json
import os
import sys
import threading
import time


class Clock:
    """What one process did."""

    def __init__(self, folder):
        self.folder = folder
        self.local = threading.local()
        self.every_s = float(os.environ.get("WORLD_WRITE_S", "0.5"))
        self.reset()

    def reset(self):
        """Begin anew: in a forked child nothing has happened yet."""
        self.counts = {"updates": 0, "backwards": 0, "grads": 0, "batches": 0, "next_s": 0.0, "eval_next_s": 0.0}
        self.forwards, self.forward_s, self.span_s = {}, {}, {}
        self.written = time.monotonic()

    def outermost(self, name):
        """Return whether this thread is not inside a call called `name`, and note that it is now."""
        inside = getattr(self.local, name, 0)
        setattr(self.local, name, inside + 1)
        return not inside

    def leave(self, name):
        """Note that this thread has left one call called `name`."""
        setattr(self.local, name, getattr(self.local, name) - 1)

    def write(self, *_ignored):
        """Write what is known; a process that is killed leaves out what came in the last `every_s` seconds."""
        answer = {**self.counts, "forwards": self.forwards, "forward_s": self.forward_s, "span_s": self.span_s}
        path = os.path.join(self.folder, f"{os.getpid()}.json")
        with open(path + ".part", "w") as file:
            json.dump(answer, file)
        os.replace(path + ".part", path)
        self.written = time.monotonic()

    def timed(self, kind, function):
        """Return `function`, timed as a span of `kind`."""

        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            if not self.outermost("span"):
                try:
                    return function(*args, **kwargs)
                finally:
                    self.leave("span")
            self.local.kind = kind
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.span_s[kind] = self.span_s.get(kind, 0.0) + time.perf_counter() - start
                self.local.kind = None
                self.leave("span")

        return wrapper

    def watch_torch(self):
        """Count and time torch's own events."""
        import torch
        from torch.optim import optimizer
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        def updated(*_ignored):
            self.counts["updates"] += 1
            if time.monotonic() - self.written > self.every_s:
                self.write()

        optimizer.register_optimizer_step_post_hook(updated)
        torch.autograd.backward = self.counted("backwards", torch.autograd.backward)
        torch.autograd.grad = self.counted("grads", torch.autograd.grad)
        torch.nn.Module.__call__ = self.forward(torch, torch.nn.Module.__call__)
        _BaseDataLoaderIter.__next__ = self.next(_BaseDataLoaderIter.__next__)

    def counted(self, name, function):
        """Return `function`, counted where it is the outermost call."""

        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            self.counts[name] += self.outermost(name)
            try:
                return function(*args, **kwargs)
            finally:
                self.leave(name)

        return wrapper

    def forward(self, torch, function):
        """Return `Module.__call__`, timed by mode where it is the outermost call."""

        @functools.wraps(function)
        def wrapper(module, *args, **kwargs):
            if not self.outermost("forward"):
                try:
                    return function(module, *args, **kwargs)
                finally:
                    self.leave("forward")
            mode = f"{'train' if module.training else 'eval'} {'grad' if torch.is_grad_enabled() else 'no_grad'}"
            start = time.perf_counter()
            try:
                return function(module, *args, **kwargs)
            finally:
                self.forwards[mode] = self.forwards.get(mode, 0) + 1
                self.forward_s[mode] = self.forward_s.get(mode, 0.0) + time.perf_counter() - start
                self.leave("forward")

        return wrapper

    def next(self, function):
        """Return the loader's `__next__`, timed."""

        @functools.wraps(function)
        def wrapper(loader):
            start = time.perf_counter()
            try:
                batch = function(loader)
                self.counts["batches"] += 1
                return batch
            finally:
                name = "eval_next_s" if getattr(self.local, "kind", None) == "eval" else "next_s"
                self.counts[name] += time.perf_counter() - start

        return wrapper


def pace(path):
    """Note when each update of this process's model ended, and write what a step took when the process ends."""
    import statistics

    from torch.optim import optimizer

    ends, owner = [], os.getpid()

    def write():
        between = [after - before for before, after in itertools.pairwise(ends)]
        if between and os.getpid() == owner:
            steps = [took for took in between if took <= 10 * statistics.median(between)]
            with open(path, "w") as file:
                json.dump([statistics.fmean(steps), ends[-1] - ends[0], len(ends)], file)

    optimizer.register_optimizer_step_post_hook(lambda *_: ends.append(time.perf_counter()))
    atexit.register(write)


class AfterImport:
    """A finder that calls a function right after a module has run."""

    def __init__(self, actions):
        self.actions = dict(actions)

    def find_spec(self, name, path=None, target=None):
        """Find the module as ever; where something waits for it, run that behind the module's own code."""
        action = self.actions.pop(name, None)
        if action is None:
            return None
        others = (finder for finder in list(sys.meta_path) if finder is not self)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            action(module)

        spec.loader.exec_module = exec_module
        return spec


def replaced(clock, kind, path):
    """Return what puts a timed function in place of the one at `path` ("Class.method") of a module."""

    def action(module):
        *holders, name = path.split(".")
        owner = functools.reduce(getattr, holders, module)
        setattr(owner, name, clock.timed(kind, getattr(owner, name)))

    return action


def install():
    """Seed, count and time as the environment says."""
    folder, seed = os.environ.get("WORLD_CLOCK"), os.environ.get("WORLD_SEED")
    older_numpy, paced = os.environ.get("WORLD_NUMPY_1"), os.environ.get("WORLD_PACE")
    actions = {}
    if folder:
        clock = Clock(folder)
        sys.world_clock = clock
        os.register_at_fork(after_in_child=clock.reset)
        atexit.register(clock.write)
        for kind, names in json.loads(os.environ.get("WORLD_SPANS", "{}")).items():
            for name in names:
                module, path = name.split(":")
                if module != "__main__":
                    actions[module] = joined(actions.get(module), replaced(clock, kind, path))

    def torch_is_there(module):
        import numpy

        if seed:
            module.manual_seed(int(seed))
            numpy.random.seed(int(seed))
        if older_numpy:
            numpy.Inf = numpy.inf
        if folder:
            clock.watch_torch()
        if paced:
            pace(paced)

    if folder or seed or older_numpy or paced:
        actions["torch"] = torch_is_there
        sys.meta_path.insert(0, AfterImport(actions))


def joined(first, second):
    """Return one action that does both."""
    return second if first is None else lambda module: (first(module), second(module))


install()
