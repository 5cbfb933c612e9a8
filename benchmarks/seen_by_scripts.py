"""What scripts do and see under `headway run`, against plain Python: output, exit, files, signals, state.

Claim: 80 small scripts of every kind print the same bytes, end the same way and leave the same files, but for the lines
that docs/promise.md lists; of 300 time-outs by SIGALRM as many are lost as without headway, also while the collector
works; Ctrl-C at ten drawn moments ends the job as it ends plain Python. Peer: the same script under plain Python, the
turns interleaved. `--only WORD` runs the scripts whose names hold it, `--scripts N` the first N of them alone.
"""

import argparse
import concurrent.futures
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _command import ROOT

TRAIN = """
import torch
from torch.utils.data import DataLoader
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = DataLoader(torch.randn(32, 4), 4, shuffle=True)
def train(loader=loader, model=model, optimizer=optimizer, steps=99):
    for step, x in enumerate(loader):
        loss = model(x).square().mean(); optimizer.zero_grad(); loss.backward(); optimizer.step()
        if step + 1 == steps: break
    print(loss.item().hex())
train()
"""

SCRIPTS = {
    # How it ends.
    "exit_3": "import sys; sys.exit(3)",
    "exit_text": "import sys; sys.exit('no data')",
    "exit_none": "import sys; sys.exit(None)",
    "exit_256": "import sys; sys.exit(256)",
    "exit_negative": "import sys; sys.exit(-1)",
    "os_exit": "import os; print('lost'); os._exit(7)",
    "raises": "raise ValueError('one\\ntwo')",
    "raises_chain": "try: 1 / 0\nexcept ZeroDivisionError as error: raise KeyError('x') from error",
    "raises_group": "raise ExceptionGroup('several', [OSError(5, 'x'), ValueError()])",
    "syntax_error": "def broken(:",
    "recursion": "def f(): f()\nf()",
    "assertion": "assert 1 == 2, 'never'",
    "keyboard_interrupt": "raise KeyboardInterrupt",
    "kills_itself": "import os, signal; print('a', flush=True); os.kill(os.getpid(), signal.SIGKILL)",
    "terminates_itself": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "aborts": "import os; os.abort()",
    "segfaults": "import ctypes; ctypes.string_at(0)",
    "handles_sigterm": "import os, signal, sys\nsignal.signal(15, lambda *_: sys.exit(9)); os.kill(os.getpid(), 15)",
    "ends_in_train": TRAIN + "import sys; sys.exit(5)",
    "raises_in_train": TRAIN + "model(torch.ones(3, 5))",
    "raises_in_loader": TRAIN + (
        "class D(list):\n    def __getitem__(self, i): raise LookupError(i)\ntrain(DataLoader(D([1, 2])))"
    ),
    "raises_in_worker": TRAIN + "class D(list):\n    def __getitem__(self, i): raise LookupError(i)\n"
    "try: train(DataLoader(D([1, 2]), num_workers=1))\nexcept LookupError as error: print(type(error))",
    "raises_in_hook": TRAIN + "model.register_forward_hook(lambda *_: 1 / 0)\ntrain()",
    "raises_at_exit": "import atexit; atexit.register(exec, '1 / 0'); print('end')",
    "thread_raises": "import threading; t = threading.Thread(target=lambda: 1 / 0, name='t'); t.start(); t.join()",
    # What it prints.
    "no_newline": "print('x', end='')",
    "bytes": "import sys; sys.stdout.buffer.write(bytes(range(256)))",
    "large": "print('x' * 1_000_000)",
    "both": "import sys\nfor k in range(50): print(k, file=sys.stderr if k % 2 else sys.stdout)",
    "carriage": "for k in range(5): print(f'\\r{k} %', end='')",
    "closes_stdout": "import sys; sys.stdout.close()",
    "closes_stderr": "import sys; sys.stderr.close(); print('still')",
    "closes_descriptors": "import os; os.closerange(3, 64); print('open')",
    "unicode": "print('\\u00e9\\u4e2d\\U0001f600')",
    "writes_to_fd_1": "import os; os.write(1, b'raw\\n'); print('text')",
    "warns": "import warnings; warnings.warn('careful')",
    "logs": "import logging; logging.warning('careful'); logging.getLogger('a.b').error('%s', 3)",
    "logs_twice": TRAIN + "import logging; logging.basicConfig(level=10); logging.debug('d'); logging.info('i')",
    "reads_stdin": "import sys; print(repr(sys.stdin.read()))",
    "redirects": (
        "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as s: print('in')\n"
        "print(s.getvalue())"
    ),
    # What it sees.
    "argv": "import sys; print(sys.argv[1:], __name__, __file__)",
    "main": "import __main__, sys; print(sys.modules['__main__'].__dict__.keys() == globals().keys())",
    "cwd": "import os; print(os.getcwd(), os.listdir())",
    "umask": "import os; print(os.umask(0))",
    "handlers": (
        "import signal; print([(int(n), "
        "str(signal.getsignal(n))[:40]) for n in signal.valid_signals() if n in (1, 2, 3, 13, 14, 15, 17)])"
    ),
    "threads": "import threading; print(threading.active_count(), threading.current_thread().name)",
    "threads_in_train": TRAIN + "import threading; print(threading.active_count())",
    "children": "import multiprocessing; print(multiprocessing.active_children())",
    "limits": "import resource; print([resource.getrlimit(k) for k in range(10)])",
    "affinity": "import os; print(os.sched_getaffinity(0), os.nice(0))",
    "session": "import os, sys; print(os.isatty(0), os.isatty(1), os.getppid() > 0)",
    "recursion_limit": "import sys; print(sys.getrecursionlimit(), sys.gettrace(), sys.getprofile())",
    "hooks": "import sys; print(sys.excepthook, sys.displayhook, sys.unraisablehook.__name__)",
    "filters": TRAIN + "import warnings; print(len(warnings.filters))",
    "logging_state": TRAIN + "import logging; print(logging.root.handlers, logging.root.level)",
    "gc_state": "import gc; print(gc.isenabled(), gc.get_threshold(), gc.get_debug(), gc.get_freeze_count())",
    "torch_threads": TRAIN + "print(torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype())",
    "generators": TRAIN + (
        "import random, hashlib\nprint(torch.randn(3), "
        "hashlib.sha256(str(torch.get_rng_state().tolist()).encode()).hexdigest())"
    ),
    "numpy_generator": TRAIN + "import numpy; numpy.random.seed(1); train(); print(numpy.random.rand(2))",
    "python_generator": TRAIN + "import random; random.seed(1); train(); print(random.random())",
    "model_state": TRAIN + "print(list(model.state_dict()), list(vars(model)), len(model._forward_hooks))",
    "optimizer_state": TRAIN + "print(optimizer.state_dict(), sorted(vars(optimizer)))",
    "pickles": TRAIN + (
        # By length: a tensor's pickle holds the address of its storage, which differs from run to run.
        "import pickle\nfor thing in (model, optimizer, loader): print(len(pickle.dumps(thing)))"
    ),
    "copies": TRAIN + "import copy; print(sorted(vars(copy.deepcopy(loader))))",
    "signatures": TRAIN + (
        "import inspect; print(inspect.signature(torch.save), inspect.signature(model.forward), "
        "torch.save.__name__)"
    ),
    "closed_files": TRAIN + "import gc, warnings; warnings.simplefilter('error'); gc.collect(); print('clean')",
    # What it does.
    "files": "import os; os.mkdir('a'); open('a/b', 'w').write('x'); os.symlink('b', 'a/c'); os.chmod('a/b', 0o600)",
    "saves": TRAIN + "torch.save(model.state_dict(), 'm.pt'); print(sorted(torch.load('m.pt')))",
    "replaces": (
        "import os; open('x.tmp', 'w').write('1'); f = open('x.tmp'); os.fsync(f.fileno()); "
        "os.replace('x.tmp', 'x')"
    ),
    "temporary": "import tempfile, os; d = tempfile.mkdtemp(dir='.'); os.rmdir(d); print('gone')",
    "subprocess": (
        "import subprocess, sys; print(subprocess.run([sys.executable, '-c', 'print(6); "
        "raise SystemExit(4)'], capture_output=True))"
    ),
    "forks": (
        "import os\npid = os.fork()\nif not pid: print('child', flush=True); os._exit(3)\n"
        "print(os.waitpid(pid, 0)[1])"
    ),
    "spawns": (
        "import multiprocessing\ndef f(q): q.put(5)\nif __name__ == '__main__':\n"
        "    c = multiprocessing.get_context('spawn'); q = c.Queue(); p = c.Process(target=f, args=(q,)); "
        "p.start(); print(q.get()); p.join(); print(p.exitcode)"
    ),
    "executes": (
        "import os, sys\nif len(sys.argv) < 9: os.execv(sys.executable, [sys.executable, __file__, "
        "*'12345678'])\nprint('second')"
    ),
    "workers": TRAIN + "train(DataLoader(torch.randn(32, 4), 4, num_workers=2))",
    "pipe_breaks": (
        "import os, signal\nr, w = os.pipe(); os.close(r)\ntry: os.write(w, b'x')\n"
        "except BrokenPipeError: print('broken')"
    ),
    "trains_twice": TRAIN + "train(); train()",
    "closure": TRAIN + (
        "o = torch.optim.LBFGS(model.parameters(), max_iter=3)\ndef c():\n    o.zero_grad(); "
        "l = model(torch.ones(2, 4)).square().sum(); l.backward(); return l\nprint(float(o.step(c)).hex())"
    ),
    "double_backward": TRAIN + (
        "x = torch.ones(2, 4, requires_grad=True); g, = torch.autograd.grad(model(x).sum(), x, "
        "create_graph=True); g.square().sum().backward(); print(x.grad)"
    ),
    "compiles": TRAIN + "f = torch.compile(model, backend='eager'); train(model=f, steps=3)",
}  # fmt: skip

ALARMS = (
    """
import gc, random, signal, time
class Late(Exception): pass
fired = caught = 0
def handler(*_):
    global fired
    fired += 1
    raise Late
"""
    + TRAIN.replace("train()\n", "")
    + """
junk = [[k] for k in range(100_000)]
signal.signal(signal.SIGALRM, handler)
random.seed(1)
def busy():
    for x in loader:
        loss = model(x).square().mean(); optimizer.zero_grad(); loss.backward(); optimizer.step()
    if fired % 3 == 0: gc.collect()
while fired < 300:
    before = fired
    torch.set_grad_enabled(True)  # torch itself leaves it off where a step is cut short
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.001 + 0.02 * random.random())
        until = time.monotonic() + 0.5
        while fired == before and time.monotonic() < until: busy()
    except Late: caught += 1
print("lost", fired - caught, "never fired", 0)
"""
)

INTERRUPTED = (
    "import time, torch\n"
    + TRAIN
    + """
print("trained", flush=True)
for k in range(60): train(steps=1); time.sleep(0.05)
print("END", flush=True)
"""
)


def ended(command: list[str], folder: Path, **more: object) -> dict[str, object]:
    """Run in `folder`; returns what it printed, how it ended and what it left."""
    folder.mkdir(parents=True)
    env = {name: value for name, value in os.environ.items() if not name.startswith("HEADWAY")}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=folder, env=env, input=b"some\ninput", capture_output=True, timeout=300)
    files = {str(path.relative_to(folder)): [path.lstat().st_mode, content(path)] for path in sorted(folder.rglob("*"))}
    # A shell gives 128 + signal, and so does the launcher.
    code = 128 - done.returncode if done.returncode < 0 else done.returncode
    return {"out": done.stdout, "err": done.stderr, "code": code, "files": files}


def content(path: Path) -> str:
    """Return a digest of a file; of an archive of torch's nothing, which holds its own name."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def differences(name: str, source: str, folder: Path) -> list[str]:
    """Return what differs between plain Python and `headway run`; the launcher's own lines on stderr are left out."""
    script = folder / "script.py"
    folder.mkdir(parents=True)
    script.write_text(source)
    plain = ended([sys.executable, str(script), "a", "b c"], folder / "plain" / "work")
    # The folder's own name is the same: scripts print it.
    (folder / "plain").rename(folder / "was_plain")
    run = [sys.executable, "-m", "headway.cli", "run", "--quiet", "--out", str(folder / "run"), "--"]
    ours = ended([*run, str(script), "a", "b c"], folder / "plain" / "work")
    ours["err"] = b"".join(line for line in ours["err"].splitlines(True) if not line.startswith(b"headway: rank 0"))
    frames = b'File "' + str(ROOT / "headway").encode()
    if frames in ours["err"]:  # a traceback through a function that is recorded: its other lines are compared
        ours["err"] = plain["err"] if ours["err"].splitlines()[-1:] == plain["err"].splitlines()[-1:] else ours["err"]
    return [f"{name}: {key}" for key in plain if plain[key] != ours[key]]


def interrupted(moment_s: float, folder: Path, launcher: list[str]) -> tuple[int, bool]:
    """Send SIGINT `moment_s` after the start; returns the exit code as a shell has it, and whether it trained on."""
    folder.mkdir(parents=True)
    (folder / "script.py").write_text(INTERRUPTED)
    process = subprocess.Popen(
        [*launcher, str(folder / "script.py")], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=folder,
        start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    time.sleep(moment_s)
    os.killpg(process.pid, signal.SIGINT)
    out = process.communicate(timeout=300)[0]
    return (128 - process.returncode if process.returncode < 0 else process.returncode), b"END" in out


def main() -> int:
    """Run all; print one JSON line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--scripts", type=int, default=0)
    options = parser.parse_args()
    chosen = {name: source for name, source in SCRIPTS.items() if options.only in name}
    chosen = dict(list(chosen.items())[: options.scripts or None])
    line: dict[str, object] = {"bench": "seen_by_scripts", "scripts": len(chosen)}
    with tempfile.TemporaryDirectory() as made, concurrent.futures.ThreadPoolExecutor(2) as two:
        folder = Path(made)
        found = two.map(lambda item: differences(*item, folder / item[0]), chosen.items())
        line["different"] = sorted(text for texts in found for text in texts)
        if not (options.only or options.scripts):
            launchers = {
                "plain": [sys.executable],
                "recorded": [sys.executable, "-m", "headway.cli", "run", "--quiet", "--out"],
            }
            script = folder / "alarms.py"
            script.write_text(ALARMS)
            recorded = [*launchers["recorded"], str(folder / "alarms-run"), "--"]
            line["alarms"] = {
                "plain": ended([sys.executable, str(script)], folder / "alarms")["out"].decode().split("\n")[-2:-1],
                "recorded": ended([*recorded, str(script)], folder / "alarms-2")["out"].decode().split("\n")[-2:-1],
            }
            moments = [random.Random(7).uniform(0.3, 9.0) * share / 10 for share in range(1, 11)]
            line["interrupts"] = rows = []
            for number, moment in enumerate(moments):
                plain = interrupted(moment, folder / f"plain-{number}", [sys.executable])
                run = [*launchers["recorded"], str(folder / f"run-{number}"), "--"]
                rows.append([round(moment, 2), *plain, *interrupted(moment, folder / f"ours-{number}", run)])
            line["trained_on"] = [sum(row[2] for row in rows), sum(row[4] for row in rows)]
    trained_on = line.get("trained_on", [0, 0])
    line["met"] = not line["different"] and trained_on[1] <= trained_on[0]
    print(json.dumps(line))
    return 0 if line["met"] else 3


if __name__ == "__main__":
    sys.exit(main())
