"""Twenty scripts under `headway tune`: each ends as it would have, or with exit code 3 and the digits of plain python.

Claim: none dies that plain python ends, however it is written: optimizers that are made anew, groups that are added,
losses that are not found, loaders with workers or of unknown length, errors of its own, errors inside the tuner. Where
the exit code is 3 the printed digest is that of plain python, unless the script's own count of steps decides what it
does (`counts`). Peer: the same script under plain python.

`python benchmarks/tune_jobs.py NAME ...` runs some of them; without names a few, `--full` all.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _command import ROOT, python_path

LIMIT_S = 120.0

SCRIPT = """
import hashlib, sys, torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
torch.manual_seed(0)
x = torch.randn(640, 12)
y = (x[:, :4].sum(1) > 0).long()
rows, loss_of = TensorDataset(x, y), torch.nn.CrossEntropyLoss()
body, head = torch.nn.Linear(12, 16), torch.nn.Linear(16, 2)
net = torch.nn.Sequential(body, torch.nn.ReLU(), head)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
loader = DataLoader(rows, 16, shuffle=True)
n = 0
def train(a, b):
    loss = loss_of(net(a), b)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss
{before}
for epoch in range(3):
    for a, b in loader:
        n += 1
{each}
{after}
digits = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
print("DIGEST", hashlib.sha1(digits).hexdigest())
"""

JOBS = {
    "plain": {},
    "adamw": {"before": "optimizer = torch.optim.AdamW(net.parameters(), 0.01)"},
    "group": {"before": "optimizer = torch.optim.SGD(head.parameters(), lr=0.01)",
              "each": "if n == 60: optimizer.add_param_group({'params': body.parameters()})\ntrain(a, b)"},
    "remade": {"each": "if n == 30: optimizer = torch.optim.Adam(net.parameters(), 0.01)\ntrain(a, b)"},
    "remade_late": {"after": "optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)\nfor a, b in loader: train(a, b)"},
    "two": {"before": "other = torch.optim.SGD(head.parameters(), lr=0.01)", "each": "train(a, b)\nother.step()"},
    "scaler": {"before": "scaler = torch.amp.GradScaler('cpu')",
               "each": "optimizer.zero_grad()\nscaler.scale(loss_of(net(a), b)).backward()\n"
                       "scaler.step(optimizer)\nscaler.update()"},
    "closure": {"each": "def again():\n    optimizer.zero_grad()\n    loss = loss_of(net(a), b)\n    loss.backward()\n"
                        "    return loss\noptimizer.step(again)"},
    "accumulation": {"each": "loss_of(net(a), b).backward()\nif n % 4 == 0: optimizer.step(), optimizer.zero_grad()"},
    "schedule": {"before": "schedule = torch.optim.lr_scheduler.StepLR(optimizer, 40)",
                 "each": "train(a, b)\nschedule.step()"},
    "by_hand": {"each": "for p, g in zip(net.parameters(), torch.autograd.grad(loss_of(net(a), b), "
                        "list(net.parameters()))): p.data.sub_(g, alpha=0.01)"},
    "workers": {"before": "loader = DataLoader(rows, 16, shuffle=True, num_workers=2)"},
    "stream": {"before": "class Stream(IterableDataset):\n    def __iter__(self): return iter(list(zip(x, y)))\n"
                         "loader = DataLoader(Stream(), 16)"},
    "short": {"before": "loader = DataLoader(rows, 160)"},
    "evaluates": {"each": "train(a, b)\nif n % 20 == 0:\n    with torch.no_grad(): [net(c) for c, d in loader]"},
    "breaks": {"each": "train(a, b)\nif n % 25 == 0: break"},
    "own_error": {"before": "class Bad(TensorDataset):\n    def __getitem__(self, i):\n"
                            "        if i == 77: raise KeyError('row')\n        return super().__getitem__(i)\n"
                            "bad = DataLoader(Bad(x, y), 16)\n"
                            "try:\n    for a, b in bad: train(a, b)\nexcept KeyError as error: print('seen', error)"},
    "frozen": {"before": "body.requires_grad_(False)"},
    "replaced": {"each": "if n == 30:\n    net = torch.nn.Linear(12, 2)\n"
                         "    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)\ntrain(a, b)"},
    "fails_inside": {"each": "train(a, b)\nB = sys.modules.get('headway.model.tuning.torch_branches')\n"
                             "if n == 30 and B: B.TrainingState = None"},
}  # fmt: skip
"""Script -> what stands in front of its loop, in it (a step by default), and behind it."""

COUNTS = ("group", "remade", "replaced", "evaluates", "breaks")
"""Scripts whose own count of steps, those of trials included, decides what they do."""

DEFAULT = ("group", "remade", "workers", "own_error", "fails_inside")


def text_of(name):
    """Return the script."""
    parts = {"before": "", "each": "train(a, b)", "after": "", **JOBS[name]}
    return SCRIPT.format(**{**parts, "each": "\n".join(" " * 8 + line for line in parts["each"].splitlines())})


def ended(command):
    """Run a command; return its exit code, the digest that it prints, and the end of what it says."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    found = [line.split()[-1] for line in done.stdout.splitlines() if "DIGEST" in line]
    return done.returncode, found[-1] if found else "", done.stderr.strip()[-300:]


def trial(name, folder):
    """Return the exit code under `headway tune`, and what is wrong with it."""
    script = Path(folder) / f"{name}.py"
    script.write_text(text_of(name))
    tune = ["tune", "--setting", "lr=1e-4:1:log", "--trials", "5", "--out", f"{folder}/{name}", "--"]
    plain, tuned = ended([sys.executable, script]), ended([sys.executable, "-m", "headway", *tune, script])
    if plain[0] != 0 or tuned[0] not in (0, 3) or not tuned[1]:
        return tuned[0], f"ends with {tuned[0]}, plain python with {plain[0]}: {tuned[2]}"
    is_other = tuned[0] == 3 and tuned[1] != plain[1] and name not in COUNTS
    return tuned[0], "exit code 3, and other digits than plain python" if is_other else ""


def main():
    """Run scripts, and print one JSON line; 3 where the claim is missed."""
    names = [one for one in sys.argv[1:] if one != "--full"] or list(DEFAULT)
    names = [*JOBS] if "--full" in sys.argv else names
    with tempfile.TemporaryDirectory() as folder:
        rows = {name: trial(name, folder) for name in names}
    wrong = {name: what for name, (_, what) in rows.items() if what}
    codes = {name: code for name, (code, _) in rows.items()}
    claim = "wrong == {}: ends as plain python does, or with 3 and its digits"
    print(json.dumps({"bench": "tune_jobs", "scripts": len(names), "codes": codes, "wrong": wrong, "claim": claim}))
    return 3 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
