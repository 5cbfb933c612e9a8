"""Random kills of trainers and of their checkpoint agents: is the saved state always found, and bit for bit?

Claim (CF3): over twenty `kill -9` at random points, persist and commit among them (the agents are slowed down, so that
a save is under way most of the time), each of a trainer, of an agent or of both, a valid checkpoint is always found,
and what is restored equals what was saved bit for bit. A job that goes on with as many ranks ends with parameters
bit-equal to those of the job that nobody disturbed; one that goes on with 1, 2 or 4 ranks by turns consumes the same
examples at every step, and its losses are those within 1e-5. Ten kills by default, `--full` all twenty; `--seed N`
begins elsewhere.
"""

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import psutil
import torch
import torch.distributed as dist

import headway
from headway.checkpoint import CheckpointPolicy, Keep
from headway.checkpoint.agent.agent import socket_path
from headway.core.rng import stream
from headway.data import DataLoader
from headway.storage import verify
from headway.storage.commit import committed
from headway.storage.digests import checksum

GLOBAL_BATCH, EXAMPLES, WIDTH = 8, 64, 160
STEPS, EVERY = 24, 3
STEP_S = 0.01
LIMIT_S = 90.0
RATE_MB_S = "4"
"""An image of about 0.3 MB then takes 80 ms, about as long as three steps on a busy machine."""


class Dataset(torch.utils.data.Dataset):
    """Examples that name themselves."""

    def __len__(self) -> int:
        """Return how many there are."""
        return EXAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """Return an example and its number."""
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(index)), index


class Every(CheckpointPolicy):
    """Saves every few steps, whatever it costs."""

    def interval(self) -> int:
        """Return the steps between saves."""
        return EVERY


@dataclass(slots=True)
class Outcome:
    """How a job ended."""

    kills: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    """What was not as it should be."""
    restored: int = 0
    """Restores that were compared with what was saved."""
    from_memory: int = 0
    """Those whose bytes came from an agent's memory."""


def portrait(model: torch.nn.Module, opt: torch.optim.Optimizer) -> str:
    """Return a digest of all state that every rank holds alike."""
    state = [one[key] for _, one in sorted(opt.state_dict()["state"].items()) for key in sorted(one)]
    return checksum(b"".join(value.numpy().tobytes() for value in (*model.state_dict().values(), *state)))


def note(folder: Path, rank: int, **facts: object) -> None:
    """Write a line into this rank's log: one write, whole or not at all."""
    with (folder / f"log-{rank}.jsonl").open("ab", buffering=0) as log:
        log.write(msgspec.json.encode(facts) + b"\n")


def train(folder: Path, world: int, rank: int, attempt: int) -> None:
    """Be one rank: train on from the newest checkpoint."""
    torch.set_num_threads(1)
    warnings.simplefilter("default")  # an agent that was killed is a warning
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store-{attempt}", rank=rank, world_size=world)
    torch.manual_seed(7)
    net = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1))
    model = torch.nn.parallel.DistributedDataParallel(net) if world > 1 else net
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(Dataset(), batch_size=GLOBAL_BATCH // world, shuffle=True, seed=3, rank=rank, world_size=world)
    ckpt = headway.Checkpointer(folder / "ckpts", model=net, opt=opt, loader=loader, policy=Every(), keep=Keep(last=2))
    ckpt.attach(opt)
    report = ckpt.restore()
    step = report.step or 0
    note(folder, rank, restored=step, portrait=portrait(net, opt), source=report.source, skipped=report.skipped)
    while step < STEPS:
        for inputs, ids in loader:
            opt.zero_grad()
            loss = model(inputs).square().mean()
            loss.backward()
            opt.step()
            step += 1
            note(
                folder,
                rank,
                attempt=attempt,
                step=step,
                ids=ids.tolist(),
                loss=loss.item(),
                portrait=portrait(net, opt),
            )
            ckpt.maybe_save()
            time.sleep(STEP_S)
            if step == STEPS:
                break
    ckpt.close()
    note(folder, rank, done=portrait(net, opt))


def forked(act: Callable[[], None], log: Path) -> int:
    """Run `act` in a child; what it says goes into a file."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(said, 1), os.dup2(said, 2)
        act()
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def start(folder: Path, world: int, attempt: int) -> dict[int, int]:
    """Start an attempt; return process -> rank."""

    def trainer(rank: int) -> Callable[[], None]:
        return lambda: train(folder, world, rank, attempt)

    return {forked(trainer(rank), folder / "said.txt"): rank for rank in range(world)}


def lines(folder: Path, rank: int) -> list[dict]:
    """Return a rank's log."""
    path = folder / f"log-{rank}.jsonl"
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def progress(folder: Path) -> int:
    """Return the newest step of rank 0."""
    told = lines(folder, 0)
    return told[-1].get("step", told[-1].get("restored", 0)) if told else 0


def agents_of(trainer: int) -> list[int]:
    """Return the checkpoint agents that a trainer has started."""
    with contextlib.suppress(psutil.Error):
        children = psutil.Process(trainer).children()
        return [child.pid for child in children if "headway.checkpoint.agent.agent" in child.cmdline()]
    return []


def strike(kind: str, ranks: dict[int, int], rng: np.random.Generator) -> bool:
    """Kill one trainer, its agent, or both; return whether the attempt is over with that."""
    victim = int(rng.choice(sorted(ranks)))
    agents = agents_of(victim)
    if kind in ("agent", "both"):
        for agent in agents:
            os.kill(agent, signal.SIGKILL)
    if kind in ("trainer", "both"):
        for pid in [victim, *(pid for pid in ranks if pid != victim)]:  # a launcher ends the others
            os.kill(pid, signal.SIGKILL)
    return kind != "agent"


def ended(ranks: dict[int, int]) -> dict[int, int]:
    """Take note of children that have ended; return process -> exit code."""
    codes = {}
    for pid in list(ranks):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            codes[pid] = os.waitstatus_to_exitcode(status)
    return codes


def attempt_until(folder: Path, ranks: dict[int, int], goal: int, outcome: Outcome) -> bool:
    """Wait until the attempt has taken step `goal`, or is over; return whether it goes on."""
    until = time.monotonic() + LIMIT_S
    while ranks and progress(folder) < goal:
        for pid, code in ended(ranks).items():
            del ranks[pid]
            if code:
                outcome.wrong.append(f"a rank ended with {code}: {(folder / 'said.txt').read_text()[-800:]}")
        if time.monotonic() > until:
            outcome.wrong.append(f"step {goal} was not reached within {LIMIT_S:.0f} s")
            break
        time.sleep(0.003)
    return bool(ranks) and not outcome.wrong


def play(seed: int, num_kills: int, worlds: tuple[int, ...], expected: tuple[list[dict], str]) -> Outcome:
    """Run one job through its kills, with each of the `worlds` in turn, and compare it with what it should be."""
    rng, outcome = stream(seed, "checkpoint kills"), Outcome()
    with tempfile.TemporaryDirectory(prefix="hw-kills-") as name:
        folder = Path(name)
        attempt, ranks = 0, start(folder, worlds[0], 0)
        for _ in range(num_kills):
            begin = progress(folder)
            # Later than the first save of the attempt, so that there is something to lose; anywhere in a save.
            if not attempt_until(
                folder, ranks, min(begin + int(rng.integers(EVERY, 2 * EVERY + 1)), STEPS - 1), outcome
            ):
                break
            time.sleep(float(rng.uniform(0.0, 0.12)))
            kind = ("trainer", "agent", "both")[int(rng.integers(3))]
            outcome.kills[kind] = outcome.kills.get(kind, 0) + 1
            if strike(kind, ranks, rng):
                for pid in ranks:
                    os.waitpid(pid, 0)
                attempt += 1
                ranks = start(folder, worlds[attempt % len(worlds)], attempt)
        attempt_until(folder, ranks, STEPS + 1, outcome)
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        end_agents(folder / "ckpts")
        check(folder, outcome, expected, same_world=len(set(worlds)) == 1)
    return outcome


def end_agents(root: Path) -> None:
    """End the agents of dead trainers, which would stay for a restart."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "headway.checkpoint.agent.agent" in words and any(
            socket_path(root, rank).stem in words[-1] for rank in range(4)
        ):
            with contextlib.suppress(psutil.Error):
                process.kill()
                process.wait(10)


def undisturbed(world: int) -> tuple[list[dict], str]:
    """Return the steps of the job that nobody disturbs, and a digest of its end."""
    with tempfile.TemporaryDirectory(prefix="hw-kills-") as name:
        folder, outcome = Path(name), Outcome()
        attempt_until(folder, start(folder, world, 0), STEPS + 1, outcome)
        assert not outcome.wrong, outcome.wrong
        return steps_of(folder), end_of(folder)


def steps_of(folder: Path) -> list[dict]:
    """Return what was done at every step, by the last attempt that did it: examples of all ranks, mean loss."""
    told = [line for rank in range(4) for line in lines(folder, rank) if "step" in line]
    last = {line["step"]: max(other["attempt"] for other in told if other["step"] == line["step"]) for line in told}
    found = []
    for step, attempt in sorted(last.items()):
        mine = [line for line in told if (line["step"], line["attempt"]) == (step, attempt)]
        ids = sorted(number for line in mine for number in line["ids"])
        found.append({"step": step, "ids": ids, "loss": float(np.mean([line["loss"] for line in mine]))})
    return found


def end_of(folder: Path) -> str:
    """Return the digest of the state at the end, which all ranks of the last attempt tell alike; "" if they differ."""
    ends = {line["done"] for rank in range(4) for line in lines(folder, rank) if "done" in line}
    return ends.pop() if len(ends) == 1 else ""


def check(folder: Path, outcome: Outcome, expected: tuple[list[dict], str], *, same_world: bool) -> None:
    """Compare a job with the undisturbed one, and every restore with what was saved."""
    told = [line for rank in range(4) for line in lines(folder, rank)]
    saved: dict[int, set[str]] = {}
    for line in told:
        if "step" in line:
            saved.setdefault(line["step"], set()).add(line["portrait"])
    for line in told:
        if line.get("restored"):
            outcome.restored += 1
            outcome.from_memory += line["source"] == "memory"
            if line["portrait"] not in saved[line["restored"]]:
                outcome.wrong.append(f"step {line['restored']} was restored otherwise than it was saved")
        if line.get("skipped"):
            outcome.wrong.append(f"a committed checkpoint was not whole: {line['skipped']}")
    bad = [entry.path.name for entry in committed(folder / "ckpts") if verify(entry.path).status != "good"]
    outcome.wrong += [f"{name} is damaged" for name in bad]
    if not committed(folder / "ckpts"):
        outcome.wrong.append("no checkpoint was found at the end")
    steps, end = steps_of(folder), end_of(folder)
    if [one["ids"] for one in steps] != [one["ids"] for one in expected[0]]:
        outcome.wrong.append("other examples were consumed")
    if same_world and end != expected[1]:
        outcome.wrong.append("the parameters at the end are others")
    losses = [(mine["loss"], theirs["loss"]) for mine, theirs in zip(steps, expected[0], strict=False)]
    if not all(abs(mine - theirs) <= 1e-5 for mine, theirs in losses):
        outcome.wrong.append("losses differ by more than 1e-5")


def main() -> int:
    """Play the jobs; print one JSON line."""
    os.environ |= {"HEADWAY_CKPT_RATE_MB_S": RATE_MB_S, "HEADWAY_CKPT_LINGER_S": "20"}
    full = "--full" in sys.argv
    first = int(sys.argv[sys.argv.index("--seed") + 1]) if "--seed" in sys.argv else 0
    jobs = [(seed, 5, (2,) if seed % 2 == 0 else (2, 1, 4)) for seed in range(first, first + (4 if full else 2))]
    expected = undisturbed(2)
    outcomes = [play(seed, kills, worlds, expected) for seed, kills, worlds in jobs]
    kills = {kind: sum(o.kills.get(kind, 0) for o in outcomes) for kind in ("trainer", "agent", "both")}
    wrong = [f"seed {seed}: {what}" for (seed, *_), o in zip(jobs, outcomes, strict=True) for what in o.wrong]
    met = not wrong and sum(kills.values()) == 5 * len(jobs)
    print(json.dumps({
        "bench": "checkpoint_kills", "jobs": len(jobs), "kills": kills, "restored": sum(o.restored for o in outcomes),
        "from_memory": sum(o.from_memory for o in outcomes), "wrong": wrong, "baseline": "the job that nobody disturbs",
        "claim": "restored bit for bit always; same ranks: same parameters; other ranks: same examples, losses in 1e-5",
        "met": met,
    }))  # fmt: skip
    return 0 if met else 3


if __name__ == "__main__":
    sys.exit(main())
