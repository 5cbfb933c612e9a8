"""Does the status line count the steps that the ledger counts?

Claim: in twenty scripts (validation, transforms that run models, GANs, reinforcement learning, accumulation, trainers,
several optimizers, ...) the last status line of `headway run` says the steps that `headway why` says, within
one. Peer: the script's own count of its updates, which it prints.

Prints one JSON line; a script whose library is not installed is left out, and named.
"""

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _command import headway

HEAD = """
import time, torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, TensorDataset
torch.manual_seed(0)
def net(): return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))
def rows(n=160): return TensorDataset(torch.randn(n, 16), torch.randint(0, 2, (n,)))
model = net(); opt = torch.optim.AdamW(model.parameters(), 1e-3); n = 0
def update(loss, opt=opt):
    global n
    loss.backward(); opt.step(); opt.zero_grad(); n += 1
"""
LOOP = "for e in range(2):\n    for x, y in DataLoader(rows(), 8): update(cross_entropy(model(x), y))\n"
EVAL = "    with torch.no_grad():\n        for x, y in DataLoader(rows(), 8): model(x)\n"
PER_EXAMPLE = """
inner = net()
class D(Dataset):
    def __len__(self): return 160
    def __getitem__(self, k):
        {how}
        return x[:16].detach(), k % 2
for e in range(2):
    for x, y in DataLoader(D(), 8, num_workers={workers}): update(cross_entropy(model(x), y))
"""
SCRIPTS = {
    "plain": LOOP,
    "validation": LOOP + EVAL,
    "validation in eval mode": LOOP + "    model.eval()\n" + EVAL + "    model.train()\n",
    "no_grad model per example": PER_EXAMPLE.format(
        how="with torch.no_grad(): x = torch.cat([inner(torch.randn(16)), torch.randn(14)])", workers=0
    ),
    "model per example": PER_EXAMPLE.format(how="x = torch.cat([inner(torch.randn(16)), torch.randn(14)])", workers=0),
    "model per example in workers": PER_EXAMPLE.format(
        how="with torch.no_grad(): x = torch.cat([inner(torch.randn(16)), torch.randn(14)])", workers=1
    ),
    "inference_mode teacher": "teacher = net()\nfor x, y in DataLoader(rows(), 8):\n"
    "    with torch.inference_mode(): t = teacher(x)\n    update((model(x) - t.clone()).square().mean())\n",
    "accumulation": "for k, (x, y) in enumerate(DataLoader(rows(320), 8)):\n"
    "    cross_entropy(model(x), y).backward()\n"
    "    if k % 4 == 3: opt.step(); opt.zero_grad(); n += 1\n",
    "gan": "d, g = net(), nn.Linear(4, 16)\n"
    "od, og = torch.optim.Adam(d.parameters()), torch.optim.Adam(g.parameters())\n"
    "for x, y in DataLoader(rows(), 8):\n    f = g(torch.randn(8, 4))\n"
    "    update(d(x).mean() - d(f.detach()).mean(), od)\n    update(d(f).mean(), og); n -= 1\n",
    "reinforcement learning": "for e in range(20):\n    with torch.no_grad():\n        s = torch.randn(16)\n"
    "        for k in range(30): a = torch.distributions.Categorical(logits=model(s)).sample(); s = torch.randn(16)\n"
    "    for k in range(4): update(model(torch.randn(30, 16)).square().mean())\n",
    "closure": "lb = torch.optim.LBFGS(model.parameters(), max_iter=4)\nfor x, y in DataLoader(rows(), 16):\n"
    "    def c():\n        lb.zero_grad(); l = cross_entropy(model(x), y); l.backward(); return l\n"
    "    lb.step(c); n += 1\n",
    "manual sgd": "for x, y in DataLoader(rows(), 8):\n    cross_entropy(model(x), y).backward(); n += 1\n"
    "    with torch.no_grad():\n        for p in model.parameters(): p -= .1 * p.grad; p.grad = None\n",
    "clipping and scheduler": "sch = torch.optim.lr_scheduler.StepLR(opt, 5)\nfor x, y in DataLoader(rows(), 8):\n"
    "    loss = cross_entropy(model(x), y); loss.backward(); nn.utils.clip_grad_norm_(model.parameters(), 1.)\n"
    "    opt.step(); opt.zero_grad(); sch.step(); n += 1\n",
    "scaler": "sc = torch.amp.GradScaler('cpu')\nfor x, y in DataLoader(rows(), 8):\n"
    "    with torch.autocast('cpu'): loss = cross_entropy(model(x), y)\n"
    "    sc.scale(loss).backward(); sc.step(opt); sc.update(); opt.zero_grad(); n += 1\n",
    "ema": "avg = torch.optim.swa_utils.AveragedModel(model)\nfor x, y in DataLoader(rows(), 8):\n"
    "    update(cross_entropy(model(x), y)); avg.update_parameters(model)\n    with torch.no_grad(): avg(x)\n",
    "two models": "b = net(); ob = torch.optim.SGD(b.parameters(), .1)\nfor x, y in DataLoader(rows(), 8):\n"
    "    l = cross_entropy(model(x), y) + cross_entropy(b(x), y); l.backward(); opt.step(); ob.step()\n"
    "    opt.zero_grad(); ob.zero_grad(); n += 1\n",
    "gradients by torch.func": "ps = dict(model.named_parameters())\n"
    "f = torch.func.grad(lambda p, x, y: cross_entropy(torch.func.functional_call(model, p, x), y))\n"
    "for x, y in DataLoader(rows(), 8):\n    for k, v in f(ps, x, y).items(): ps[k].grad = v\n"
    "    opt.step(); opt.zero_grad(); n += 1\n",
    "warm-up of a model": "with torch.no_grad():\n    for k in range(10): model(torch.randn(8, 16))\n" + LOOP,
    "lightning": "import lightning\nclass M(lightning.LightningModule):\n"
    "    def __init__(self): super().__init__(); self.m = net()\n"
    "    def training_step(self, b, k): return cross_entropy(self.m(b[0]), b[1])\n"
    "    def validation_step(self, b, k): self.m(b[0])\n"
    "    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), .1)\n"
    "t = lightning.Trainer(max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,"
    " accelerator='cpu')\nt.fit(M(), DataLoader(rows(), 8), DataLoader(rows(), 8)); n = t.global_step\n",
    "transformers": "from transformers import Trainer, TrainingArguments\nclass M(nn.Module):\n"
    "    def __init__(self): super().__init__(); self.m = net()\n"
    "    def forward(self, x=None, labels=None):\n        o = self.m(x)\n"
    "        return {'loss': cross_entropy(o, labels), 'logits': o}\n"
    "d = [{'x': torch.randn(16), 'labels': torch.tensor(k % 2)} for k in range(160)]\n"
    "a = TrainingArguments(output_dir='out', num_train_epochs=2, report_to=[], use_cpu=True, disable_tqdm=True,"
    " save_strategy='no', eval_strategy='epoch')\n"
    "t = Trainer(model=M(), args=a, train_dataset=d, eval_dataset=d); t.train(); n = t.state.global_step\n",
}  # fmt: skip


def on_terminal(command: list[object], folder: Path, env: dict[str, str]) -> tuple[int, str, str]:
    """Run a command whose stderr is a terminal; return its exit code, its output, and what the terminal got."""
    ours, theirs = pty.openpty()
    with (folder / "out.txt").open("w+") as output:
        job = subprocess.Popen(list(map(str, command)), cwd=folder, env=env, stdout=output, stderr=theirs)
        os.close(theirs)
        told = b""
        with contextlib.suppress(OSError):  # EIO: the last one that had it open is gone
            while piece := os.read(ours, 65536):
                told += piece
        os.close(ours)
        code = job.wait(60)
        output.seek(0)
        return code, output.read(), told.decode(errors="replace")


def counted(name: str, folder: Path) -> dict[str, object] | None:
    """Return what the line, `why` and the script said; None where a library is missing."""
    script, run = folder / "job.py", folder / "runs" / name.replace(" ", "-")
    script.write_text(HEAD + SCRIPTS[name] + "print('updates', n, flush=True)\n")
    command = [sys.executable, "-m", "headway.cli", "run", "--windows", "0", "--out", run, "--", script]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    code, printed, told = on_terminal(command, folder, env)
    if re.search(r"No module named .(lightning|transformers)", told):
        return None
    updates = re.findall(r"^updates (\d+)", printed, re.MULTILINE)
    lines = re.findall(r"step ([\d,]+) \|", told)
    if code or not updates or not lines:
        raise RuntimeError(f"{name} ended with {code}: {told[-1500:]}")
    line, steps = int(lines[-1].replace(",", "")), int(headway("why", run)["steps"])
    row = {"script": name, "line": line, "why": steps, "updates": int(updates[-1]), "met": abs(line - steps) <= 1}
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def main() -> int:
    """Run all and print one JSON line."""
    with tempfile.TemporaryDirectory() as folder:
        rows = {name: counted(name, Path(folder)) for name in sys.argv[1:] or SCRIPTS}
    known = [row for row in rows.values() if row is not None]
    met = all(row["met"] for row in known)
    missing = [name for name, row in rows.items() if row is None]
    print(json.dumps({"bench": "live_line", "scripts": len(known), "rows": known, "left_out": missing, "met": met}))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
