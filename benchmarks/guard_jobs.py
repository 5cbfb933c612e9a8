"""Forty ways to train under 'fault.guard': as plain where nothing is bad, guarded where something is, and never stuck.

Claim: of all jobs, on one rank and on two, each ends under the guard (action skip) with the digits of plain torch as
long as its losses are good. With a NaN at a drawn step of a drawn rank it ends with finite parameters, equal on all
ranks, and names that rank; or the guard says that it does not act (Join, pipelines, sums of gradients by hand), and the
job ends with plain torch's digits. Peer: the same job without the guard. No run takes 30 s.

`python benchmarks/guard_jobs.py NAME ...` runs some of them; without names a few, `--full` all.
"""

import json
import random
import sys
import tempfile
from contextlib import nullcontext
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from headway.core.files.planfile import Remedy
from headway.fault.torch_guard import NAME
from headway.runtime.in_rank.remedy import Context, apply_one
from tests.made.pool import RankFailedError, RankPool

STEPS, LIMIT_S = 40, 30.0

DEFAULT = ("plain", "two", "lbfgs", "ddp", "ddp_aux", "ddp_remade", "ddp_join", "fsdp2")


class Run:
    """One rank of a run: its data, and the factor of its losses."""

    def __init__(self, bad):
        self.bad, self.rank = bad, dist.get_rank() if dist.is_initialized() else 0
        self.steps = STEPS

    def net(self):
        torch.manual_seed(1)
        return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def rows(self, step):
        return torch.randn(16, 8, generator=torch.Generator().manual_seed(step * 10 + self.rank))

    def loss(self, model, step, scale=1.0):
        x = self.rows(step)
        factor = float("nan") if self.bad == (step, self.rank) else scale
        return (model(x) - x.sum(1, keepdim=True)).square().mean() * factor


def simple(run, net, model, *optimizers, backward=None, every=1, sync=nullcontext, scale=lambda step: 1.0):
    """Train `net` by way of `model`: `every` batches to an update."""
    for step in range(run.steps):
        last = step % every == every - 1
        with nullcontext() if last else sync():
            loss = run.loss(model, step, scale(step)) / every
            backward(loss) if backward else loss.backward()
        if last:
            for optimizer in optimizers:
                optimizer.step()
            net.zero_grad()
    return net


def sgd(parameters, lr=0.05):
    return torch.optim.SGD(list(parameters), lr=lr, momentum=0.5)


def halves(net, kind=sgd):
    return kind(net[0].parameters()), kind(net[2].parameters())


def gan(run, wrap):
    """Two players, each with its optimizer, two backwards and two updates to a step."""
    makes, judges = torch.nn.Linear(4, 8), run.net()
    made, judged = wrap(makes), wrap(judges)
    one, other = sgd(makes.parameters(), 0.01), sgd(judges.parameters(), 0.01)
    for step in range(run.steps):
        fake = made(run.rows(step)[:, :4])
        other.zero_grad()
        (run.loss(judged, step) + judged(fake.detach()).square().mean()).backward()
        other.step()
        one.zero_grad()
        (judged(fake) - 1).square().mean().backward()
        one.step()
    return torch.nn.ModuleList([makes, judges])


def closure(run, net, model, optimizer):
    for step in range(run.steps):

        def again(step=step):
            optimizer.zero_grad()
            loss = run.loss(model, step)
            loss.backward()
            return loss

        optimizer.step(again)
    return net


def scaler(run, net, model):
    scaling, optimizer = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=5), sgd(net.parameters())
    for step in range(run.steps):
        optimizer.zero_grad()
        scaling.scale(run.loss(model, step)).backward()
        scaling.step(optimizer)
        scaling.update()
    return net


def remade(run, net, model):
    optimizer = sgd(net.parameters())
    for step in range(run.steps):
        if step == 15:
            optimizer = torch.optim.Adam(net.parameters(), 0.01)
        if step == 25:
            optimizer = sgd(net[0].parameters())
            optimizer.add_param_group({"params": [*net[2].parameters()]})
        run.loss(model, step).backward()
        optimizer.step()
        net.zero_grad()
    return net


def frozen(run, net, wrap):
    net[0].requires_grad_(False)
    return simple(run, net, wrap(net), sgd(net[2].parameters()))


def aux(run, net, model):
    """Rank 0 trains something of its own ahead of each step."""
    own = torch.nn.Linear(3, 1)
    alone = sgd(own.parameters())
    optimizer = sgd(net.parameters())
    for step in range(run.steps):
        if run.rank == 0:
            own(torch.ones(2, 3)).square().mean().backward()
            alone.step()
            alone.zero_grad()
        run.loss(model, step).backward()
        optimizer.step()
        net.zero_grad()
    return net


def no_loss(run, net, model):
    """Rank 0 begins backward from a gradient."""
    optimizer = sgd(net.parameters())
    for step in range(run.steps):
        if run.rank == 0:
            out = model(run.rows(step))
            out.backward(torch.full_like(out, 0.01))
        else:
            run.loss(model, step).backward()
        optimizer.step()
        net.zero_grad()
    return net


def joined(run, net, model):
    run.steps -= 10 * run.rank
    with Join([model]):
        return simple(run, net, model, sgd(net.parameters()))


def by_hand(run, net):
    """Sums of gradients that the script makes itself."""
    optimizer = sgd(net.parameters())
    for step in range(run.steps):
        run.loss(net, step).backward()
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        net.zero_grad()
    return net


def pipeline(run, net):
    """Two stages; the last one has the loss."""
    stage = net[0] if run.rank == 0 else net[2]
    optimizer = sgd(stage.parameters())
    for step in range(run.steps):
        if run.rank == 0:
            out, grad = stage(run.rows(step)), torch.empty(16, 8)
            dist.send(out.detach(), 1)
            dist.recv(grad, 1)
            out.backward(grad)
        else:
            into = torch.empty(16, 8)
            dist.recv(into, 0)
            into.requires_grad_()
            run.loss(lambda _, into=into: stage(into), step).backward()
            dist.send(into.grad, 0)
        optimizer.step()
        optimizer.zero_grad()
    return stage


def unused(run, net, wrap):
    """A part that takes part in every other step."""

    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.extra, self.calls = net, torch.nn.Linear(8, 1), 0
            torch.nn.init.zeros_(self.extra.weight)

        def forward(self, x):
            self.calls += 1
            return self.net(x) + (self.extra(x) if self.calls % 2 else 0.0)

    both = Two()
    return simple(run, both, wrap(both), sgd(both.parameters()))


def sharded(run, net, every=1):
    for layer in (net[0], net[2], net):
        fully_shard(layer)
    return simple(run, net, net, sgd(net.parameters()), every=every)


def own_skip(run, net, model):
    """The script looks at its loss itself, behind backward."""
    optimizer = sgd(net.parameters())
    for step in range(run.steps):
        loss = run.loss(model, step)
        loss.backward()
        if bool(loss.isfinite()):
            optimizer.step()
        optimizer.zero_grad()
    return net


def by_gradient(run, net):
    """No backward: gradients that `torch.autograd.grad` returns."""
    optimizer = sgd(net.parameters())
    for step in range(run.steps):
        gradients = torch.autograd.grad(run.loss(net, step), list(net.parameters()))
        for parameter, gradient in zip(net.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
    return net


def delayed(run, net):
    """An optimizer that steps every fourth time, with what has gathered until then."""
    often, seldom = halves(net)
    for step in range(run.steps):
        run.loss(net, step).backward()
        often.step()
        often.zero_grad()
        if step % 4 == 3:
            seldom.step()
            seldom.zero_grad()
    return net


def recomputed(run, net, model=None, **options):
    """Activations that are computed anew, by a backward within backward."""
    whole = torch.nn.Sequential(*net)
    own = model or (lambda x: whole[2](checkpoint(whole[:2], x.requires_grad_(), use_reentrant=True)))
    return simple(run, net, own, sgd(net.parameters()), **options)


def ddp(net, **options):
    return DistributedDataParallel(net, **options)


def both_losses(loss):
    torch.autograd.backward([loss / 2, loss / 2])


def hard(phase):
    return lambda step: 9.0 if step > 20 and step % 3 == phase else 1.0


def lbfgs(net, **options):
    return torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=4, **options)


ALONE = {
    "plain": lambda r, n: simple(r, n, n, sgd(n.parameters())),
    "adamw": lambda r, n: simple(r, n, n, torch.optim.AdamW(n.parameters(), 0.01)),
    "accumulation": lambda r, n: simple(r, n, n, sgd(n.parameters()), every=4),
    "two": lambda r, n: simple(r, n, n, *halves(n)),
    "three": lambda r, n: simple(r, n, n, *halves(n), sgd(n.parameters(), 0.001)),
    "two_kinds": lambda r, n: simple(r, n, n, *halves(n, lambda p: torch.optim.AdamW(p, 0.01))),
    "delayed": delayed,
    "gan": lambda r, n: gan(r, lambda net: net),
    "lbfgs": lambda r, n: closure(r, n, n, lbfgs(n)),
    "lbfgs_wolfe": lambda r, n: closure(r, n, n, lbfgs(n, line_search_fn="strong_wolfe")),
    "closure": lambda r, n: closure(r, n, n, sgd(n.parameters())),
    "scaler": lambda r, n: scaler(r, n, n),
    "remade": lambda r, n: remade(r, n, n),
    "frozen": lambda r, n: frozen(r, n, lambda net: net),
    "losses": lambda r, n: simple(r, n, n, sgd(n.parameters()), backward=both_losses),
    "recomputed": recomputed,
    "own_skip": lambda r, n: own_skip(r, n, n),
    "hard": lambda r, n: simple(r, n, n, sgd(n.parameters(), 1e-3), scale=hard(0)),
    "rescaled": lambda r, n: simple(r, n, n, sgd(n.parameters(), 1e-4), scale=lambda i: 100.0 if i > 22 else 1.0),
    "by_gradient": by_gradient,
}  # fmt: skip
"""Job on one rank -> what it does with a run and a model."""

TOGETHER = {
    "ddp": lambda r, n: simple(r, n, ddp(n), sgd(n.parameters())),
    "ddp_accumulation": lambda r, n: simple(r, n, ddp(n), sgd(n.parameters()), every=4),
    "ddp_no_sync": lambda r, n: simple(r, n, m := ddp(n), sgd(n.parameters()), every=4, sync=m.no_sync),
    "ddp_two": lambda r, n: simple(r, n, ddp(n), *halves(n)),
    "ddp_three": lambda r, n: simple(r, n, ddp(n), *halves(n), sgd(n.parameters(), 0.001)),
    "ddp_gan": lambda r, n: gan(r, ddp),
    "ddp_aux": lambda r, n: aux(r, n, ddp(n)),
    "ddp_remade": lambda r, n: remade(r, n, ddp(n)),
    "ddp_no_loss": lambda r, n: no_loss(r, n, ddp(n)),
    "ddp_frozen": lambda r, n: frozen(r, n, ddp),
    "ddp_unused": lambda r, n: unused(r, n, lambda net: ddp(net, find_unused_parameters=True)),
    "ddp_static": lambda r, n: simple(r, n, ddp(n, static_graph=True), sgd(n.parameters())),
    "ddp_view": lambda r, n: simple(r, n, ddp(n, gradient_as_bucket_view=True), sgd(n.parameters())),
    "ddp_closure": lambda r, n: closure(r, n, ddp(n), sgd(n.parameters())),
    "ddp_lbfgs": lambda r, n: closure(r, n, ddp(n), lbfgs(n)),
    "ddp_scaler": lambda r, n: scaler(r, n, ddp(n)),
    "ddp_own_group": lambda r, n: simple(r, n, ddp(n, process_group=dist.new_group()), sgd(n.parameters())),
    "ddp_hard": lambda r, n: simple(r, n, ddp(n), sgd(n.parameters(), 1e-3), scale=hard(r.rank)),
    "ddp_join": lambda r, n: joined(r, n, ddp(n)),
    "by_hand": by_hand,
    "pipeline": pipeline,
    "fsdp2": sharded,
    "fsdp2_accumulation": lambda r, n: sharded(r, n, every=4),
}  # fmt: skip
"""Job on two ranks -> what it does."""

LEFT_ALONE = ("ddp_join", "by_hand", "pipeline", "by_gradient")
"""Jobs that the guard says it does not guard, or has nothing to go by."""

CAREFUL = ("own_skip", "scaler", "ddp_scaler")
"""Jobs that leave such updates out themselves."""

LEVELS = ("hard", "rescaled", "ddp_hard")
"""Jobs whose losses jump: up to three updates are left out, the rest is trained."""


def applied(rank, name, parameters, place):
    """Apply a remedy of the table at `place` on this rank; return its context."""
    probes = SimpleNamespace(
        recorder=SimpleNamespace(rank=rank, attempt=0), run=tempfile.gettempdir(), leads=False, due=[0],
        listeners=[], failed=lambda subject, cause: None, emit=lambda *record: None,
    )  # fmt: skip
    context = Context(probes)
    context.note(apply_one(Remedy(name, parameters, allow="lossy"), {name: place}, context))
    return context


def digits_of(net):
    """Return the numbers of all parameters."""
    rows = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in net.parameters()]
    return [row.detach().flatten().tolist() for row in rows]


def rank_of_job(name, is_guarded, bad):
    """Train on this rank; return its parameters, what the guard has noted, and whether it acts."""
    run, context = Run(bad), SimpleNamespace(outcomes=[])
    if is_guarded:
        context = applied(run.rank, NAME, {"action": "skip"}, "headway.fault.remedies:REMEDIES")
    net = {**ALONE, **TOGETHER}[name](run, run.net())
    outcome = context.outcomes[-1].json() if context.outcomes else {"applied": False, "facts": {}}
    is_applied = outcome["applied"] and (name not in LEFT_ALONE)
    why = outcome.get("reason_not_applied") or ""
    return digits_of(net), outcome["facts"].get("bad", []), is_applied, why


def fault_of(name):
    """Return the drawn (step, rank) of a job's NaN: of a rank whose loss the guard can see."""
    draws = random.Random(name)
    only = {"ddp_no_loss": 1, "pipeline": 1}
    return draws.randrange(3, 20), only.get(name, draws.randrange(2 if name in TOGETHER else 1))


def trial(pool, name):
    """Return what is wrong with a job under the guard, nothing where all is well."""
    ranks, bad = (2 if name in TOGETHER else 1), fault_of(name)
    row = []
    for is_guarded, fault in ((False, None), (True, None), (False, bad), (True, bad)):
        try:
            row.append(pool.run(rank_of_job, ranks, name, is_guarded, fault, timeout_s=LIMIT_S, group=ranks > 1))
        except RankFailedError as error:
            row.append(f"died or hung: {str(error).strip().splitlines()[-1]}")
    if any(isinstance(one, str) for one in row):
        return [one for one in row if isinstance(one, str)]
    (_, good, _, guarded), wrong = row, []
    digits = [[str(rank[0]) for rank in one] for one in row]
    if name in LEVELS:
        wrong += ["more than three spikes were left out"] if len(good[0][1]) > 3 else []
    elif digits[0] != digits[1]:
        wrong.append("other digits where nothing is bad")
    if name in LEFT_ALONE:
        wrong += ["other digits than plain"] if digits[2] != digits[3] else []
        wrong += (
            ["nothing says that it is left alone"] if name in TOGETHER and not all(rank[3] for rank in guarded) else []
        )
    else:
        wrong += ["not finite"] if "nan" in "".join(digits[3]) else []
        wrong += ["ranks differ"] if len({*digits[3]}) > 1 else []
        named = [rank[1][0]["ranks"] for rank in guarded if rank[1]]
        wrong += [f"names {named}, not {bad[1]}"] if named != [[bad[1]]] * ranks else []
        wrong += ["applied does not stand"] if not all(rank[2] for rank in guarded) else []
        wrong += ["plain torch is not broken by it"] if name not in CAREFUL and "nan" not in "".join(digits[2]) else []
    return wrong


def main():
    """Run jobs, and print one JSON line; 3 where the claim is missed."""
    names = [one for one in sys.argv[1:] if one != "--full"] or list(DEFAULT)
    names = [*ALONE, *TOGETHER] if "--full" in sys.argv else names
    pool = RankPool()
    wrong = {name: found for name in names if (found := trial(pool, name))}
    claim = "wrong == {}: as plain where nothing is bad, guarded or left alone with a word where something is"
    print(
        json.dumps({"bench": "guard_jobs", "jobs": len(names), "runs": 4 * len(names), "wrong": wrong, "claim": claim})
    )
    return 3 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
