"""Eight scripts, each run twice: is an attempt that was forked warm the same as one that was started cold?

Claim: attempt 1 of each script, forked where that is safe, computes the same bits as attempt 1 under `--warm off`; the
scripts set the environment before torch, start a thread before torch, run as `python -m`, hand a class of `__main__` to
spawned workers, install signal handlers, set a variable or change torch between its import and the first model, and
draw from all generators after seeding them. The first two must have started cold, for the right reason; the others
warm.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from headway.trace.recording.incident import read_incidents

SCRIPT = """
{before}
import json, os, pathlib, signal, sys, time
import numpy, torch
import torch.distributed as dist
{classes}

def work():
{work}

if __name__ == "__main__":
    dist.init_process_group("gloo")
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), dist.get_rank()
    answer = work()
    torch.manual_seed(11)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 1))
    model = torch.nn.parallel.DistributedDataParallel(model)
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(200 if attempt == 0 else 20):
        opt.zero_grad()
        loss = model(torch.randn(4, 16)).square().mean()
        loss.backward()
        opt.step()
        if attempt == 0:
            time.sleep(0.05)  # the warm process gets ready meanwhile
    if attempt == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    with open(os.environ["ANSWER"] + f"-{{rank}}", "w") as file:
        json.dump([loss.item().hex(), answer, sys.argv[1:], __name__, sys.path[0], torch.get_num_threads()], file)
    dist.destroy_process_group()
"""

CASES: dict[str, dict[str, str]] = {
    "environment set before torch": {
        "before": "import os\nos.environ['OMP_NUM_THREADS'] = '2'", "cold": "OMP_NUM_THREADS was set",
    },
    "thread at the import": {
        "before": "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
        "cold": "1 more threads ran",
    },
    "python -m": {"work": "return __spec__.name"},
    "class of __main__ in spawned workers": {
        "classes": "class Square(torch.utils.data.Dataset):\n    def __len__(self): return 8\n"
        "    def __getitem__(self, index): return index * index, __name__",
        "work": "loader = torch.utils.data.DataLoader(Square(), batch_size=2, num_workers=2, "
        "multiprocessing_context='spawn')\nreturn [(batch.tolist(), list(names)) for batch, names in loader]",
    },
    "signal handlers": {
        "work": "seen = []\nsignal.signal(signal.SIGUSR1, lambda *_: seen.append(1))\n"
        "os.kill(os.getpid(), signal.SIGUSR1)\nnames = signal.SIGTERM, signal.SIGINT, signal.SIGPIPE\n"
        "return [seen, *(str(signal.getsignal(name)) for name in names)]",
    },
    "variable set after torch": {"work": "os.environ['SET_LATE'] = '1'\nreturn dist.get_rank()"},
    "torch patched before its parts": {
        "work": "linear = torch.nn.functional.linear\n"
        "torch.nn.functional.linear = lambda *given: 1.5 * linear(*given)\nreturn dist.get_rank()",
    },
    "seeds": {
        "work": "import random\nfresh = [torch.rand(1).item(), random.random(), float(numpy.random.rand())]\n"
        "pathlib.Path(os.environ['ANSWER'] + f'-fresh-{dist.get_rank()}').write_text(json.dumps(fresh))\n"
        "random.seed(5); numpy.random.seed(5); torch.manual_seed(5)\n"
        "return [random.random(), numpy.random.rand(3).tolist(), torch.rand(3).tolist()]",
    },
}  # fmt: skip
"""Name of a script -> the parts of it, and why it starts cold, where it does."""


def run(name: str, warm: str, folder: Path) -> tuple[list[object], bool, str]:
    """Run a script's two attempts; returns what attempt 1 answered on both ranks, whether it was warm, and why not."""
    case = CASES[name]
    work = "\n".join(f"    {line}" for line in case.get("work", "return None").splitlines())
    text = SCRIPT.format(before=case.get("before", ""), classes=case.get("classes", ""), work=work)
    (folder / "job.py").write_text(text)
    out = folder / f"run-{warm}"
    target = ["--module", "--", "job"] if name == "python -m" else ["--", "job.py"]
    line = [
        sys.executable, "-m", "headway.cli", "run", "--quiet", "--warm", warm, "--out", str(out),
        "--nproc-per-node", "2", "--max-restarts", "1", *target, "argument",
    ]  # fmt: skip
    root = str(Path(__file__).resolve().parent.parent)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "ANSWER": str(folder / warm), "PYTHONPATH": root}
    done = subprocess.run(line, env=env, cwd=folder, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise RuntimeError(f"{name}, --warm {warm}: {done.returncode}\n{done.stderr[-3000:]}")
    (incident,) = read_incidents(out)
    fresh = [json.loads(file.read_text()) for file in folder.glob(f"{warm}-fresh-*")]
    if any(len({*draws}) < len(draws) for draws in zip(*fresh, strict=True)):
        raise RuntimeError(f"ranks draw alike without a seed: {fresh}")
    answers = [json.loads((folder / f"{warm}-{rank}").read_text()) for rank in (0, 1)]
    return answers, incident.warm, incident.cold_reason or ""


def main() -> int:
    """Run all scripts and print one JSON line."""
    wrong = []
    names = sys.argv[1:] or list(CASES)
    for name, case in ((name, CASES[name]) for name in names):
        with tempfile.TemporaryDirectory() as folder:
            cold, _, _ = run(name, "off", Path(folder))
            warm, is_warm, reason = run(name, "auto", Path(folder))
        if warm != cold:
            wrong.append(f"{name}: {warm} instead of {cold}")
        if is_warm != ("cold" not in case) or case.get("cold", "") not in reason:
            wrong.append(f"{name}: warm {is_warm}, {reason}")
    result = {"bench": "warm_equals_cold", "scripts": len(names), "wrong": wrong, "claim": "wrong == []"}
    print(json.dumps(result))
    return 3 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
