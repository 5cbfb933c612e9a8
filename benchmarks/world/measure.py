"""One row: the script plain, under the clock, under headway, and with headway's own plan applied."""

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _command import ROOT
from peers.env import layered

from world.rows import Row

HERE = Path(__file__).resolve().parent
BAR_POINTS = 3.0
"""How far an account may be from the clock, in percent of device wall."""

LIMIT_S = 240

VOLATILE = re.compile(
    r"\d+(\.\d+)?\s*(ms|s|sec|seconds|it/s)\b|mfu -?\d+\.\d+%|ms/batch\s+\d+(\.\d+)?|SPS: \d+|^\d+\t|_\d{10}\b"
    r"|'?\w*(runtime|_per_second)'?: '?[\d.]+'?|cost time: [\d.]+|\b(Time|Data) +[\d.]+ \( *[\d.]+\)"
)
"""What differs from run to run in a script's output: durations, rates, process ids, times of day."""


PACE = "pace"
"""File in the clock's folder of a pass without a clock: what a step took, and all of them."""


class RowError(RuntimeError):
    """A pass of a row failed; the message quotes the end of its output."""


@dataclass(frozen=True, slots=True)
class Clocked:
    """What the clock saw, summed over processes."""

    counts: Mapping[str, float]
    span_s: Mapping[str, float]
    forwards: Mapping[str, int]


def lines_of(output: str, row: Row) -> list[str]:
    """Return the lines to compare, sorted (ranks write in any order): a job's losses, or all that does not vary."""
    lines = [VOLATILE.sub("~", line.strip()) for line in output.splitlines() if line.strip()]
    return sorted(line for line in lines if row.public or line.startswith("loss "))


def clocked(folder: Path) -> Clocked:
    """Read what the processes of a run wrote into `folder`."""
    counts: dict[str, float] = {}
    spans: dict[str, float] = {}
    forwards: dict[str, int] = {}
    for path in folder.glob("*.json"):
        seen = json.loads(path.read_text())
        for name in ("updates", "backwards", "grads", "batches", "next_s", "eval_next_s"):
            counts[name] = counts.get(name, 0) + seen[name]
        for total, part in ((spans, seen["span_s"]), (forwards, seen["forwards"])):
            for name, value in part.items():
                total[name] = total.get(name, 0) + value
    return Clocked(counts, spans, forwards)


@dataclass(frozen=True, slots=True)
class Sandbox:
    """The surroundings of one row: its interpreter, its script, and the checkout that it needs."""

    row: Row
    python: Path
    scratch: Path
    checkout: Path | None

    @classmethod
    def of(cls, row: Row, scratch: Path, scripts: Path | None) -> "Sandbox":
        """Build the environment and find the checkout. Raises `RowError` when there is none."""
        checkout = scripts / row.package if row.public and scripts else None
        if row.public and not (checkout and (checkout / row.cwd / row.script).exists()):
            raise RowError(f"no checkout of {row.package} at {checkout}: pass --scripts DIR with DIR/{row.package}.")
        return cls(row, layered(row.environment), scratch, checkout)

    def fresh(self, name: str) -> tuple[Path, Path]:
        """Return a new working folder of one pass, and the script's path."""
        folder = self.scratch / name
        if self.checkout is None:
            folder.mkdir(parents=True)
            return folder, HERE / "jobs" / self.row.script
        shutil.copytree(self.checkout / self.row.cwd, folder, ignore=shutil.ignore_patterns(".git", "*.ipynb"))
        if self.row.prepare:
            self.row.prepare(folder)
        return folder, folder / self.row.script

    def environment(self, folder: Path, **more: str) -> dict[str, str]:
        """Return the variables of one pass."""
        standins = [HERE / "standins" / name for name in self.row.standins]
        paths = [HERE / "site", *standins, *([folder] if self.checkout else []), ROOT]
        # Unbuffered, two ranks would write pieces of one line.
        ours = ("HEADWAY_", "WORLD_", "PYTHONUNBUFFERED")
        outside = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
        return {
            **outside, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
            "MPLBACKEND": "Agg", "PYTHONHASHSEED": "0", "JOB_OUT": str(folder / "out"), **self.row.env, **more,
        }  # fmt: skip

    def command(self, *program: object) -> list[str]:
        """Return a command line: the interpreter, `program` (which ends with the script), the row's arguments."""
        return [str(part) for part in (self.python, *program, *self.row.arguments)]


def finished(command: list[str], cwd: Path, env: Mapping[str, str], *, code: int = 0) -> str:
    """Run a command and return its stdout. Raises `RowError` when it exits otherwise or takes too long."""
    try:
        done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        raise RowError(f"longer than {LIMIT_S} s: {' '.join(command)}") from None
    if done.returncode != code:
        raise RowError(f"exit {done.returncode}: {' '.join(command)}\n{done.stdout[-500:]}\n{done.stderr[-1500:]}")
    return done.stdout


@dataclass(frozen=True, slots=True)
class Pass:
    """One run of the script: what it printed, what the clock saw, what headway answered and where it recorded."""

    lines: list[str]
    clock: Clocked | None = None
    answer: Mapping[str, Any] = field(default_factory=dict)
    run: Path | None = None
    pace_s: tuple[float, float] = (float("nan"), float("nan"))
    """Seconds of the mean step, and from the first update to the last one; nan with a clock."""


READ_SCALARS = """
import sys
from pathlib import Path
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
for folder in sorted({path.parent for path in Path(sys.argv[1]).rglob("events.out.tfevents.*")}):
    events = EventAccumulator(str(folder)).Reload()
    for tag in events.Tags()["scalars"]:
        if not tag.endswith("SPS"):
            print(tag, [(event.step, event.value) for event in events.Scalars(tag)])
"""
"""Prints a line for each scalar in the TensorBoard files below a folder, but for the rates (steps per second)."""


def compared(sandbox: Sandbox, output: str, folder: Path) -> list[str]:
    """Return what must not change: the lines of `lines_of`, and the row's scalars. Raises `RowError` where none are."""
    lines = lines_of(output, sandbox.row)
    if not sandbox.row.scalars:
        return lines
    scalars = finished(sandbox.command("-c", READ_SCALARS, folder), sandbox.scratch, dict(os.environ)).splitlines()
    if not scalars:
        raise RowError(f"no scalar in the TensorBoard files below {folder}")
    return lines + scalars


def plainly(sandbox: Sandbox, name: str, *, clock: bool = False) -> Pass:
    """Run the script without headway."""
    folder, script = sandbox.fresh(name)
    before, env, clocks = watched(sandbox, folder, name, clock)
    output = finished(sandbox.command(*before, script), folder, env)
    return Pass(compared(sandbox, output, folder), clocked(clocks), pace_s=paced(clocks))


def under_headway(sandbox: Sandbox, name: str, *options: object, clock: bool = False) -> Pass:
    """Run the script under headway."""
    folder, script = sandbox.fresh(name)
    run = sandbox.scratch / f"run-{name}"
    before, env, clocks = watched(sandbox, folder, name, clock)
    recorder = ("-m", "headway.cli", "run", "--json", "--out", run, *sandbox.row.launch, *options, "--")
    answer = json.loads(finished(sandbox.command(*recorder, *before, script), folder, env))
    output = "\n".join(path.read_text() for path in sorted((run / "logs").glob("r*.out")))
    return Pass(compared(sandbox, output, folder), clocked(clocks), answer, run, paced(clocks))


def paced(clocks: Path) -> tuple[float, float]:
    """Return what the pace of a pass without a clock says."""
    if not (clocks / PACE).exists():
        return float("nan"), float("nan")
    step_s, training_s, _ = json.loads((clocks / PACE).read_text())
    return step_s, training_s


def watched(sandbox: Sandbox, folder: Path, name: str, clock: bool) -> tuple[list[Path], dict[str, str], Path]:
    """Return what comes before the script, the variables, and the clock's folder: empty when no clock is asked for."""
    clocks = sandbox.scratch / f"clocks-{name}"
    clocks.mkdir()
    if not clock:
        return [], sandbox.environment(folder, WORLD_PACE=str(clocks / PACE)), clocks
    spans = json.dumps({kind: list(names) for kind, names in sandbox.row.spans.items()})
    env = sandbox.environment(folder, WORLD_CLOCK=str(clocks), WORLD_SPANS=spans)
    return [HERE / "site" / "timed_script.py"], env, clocks


def asked(sandbox: Sandbox, *arguments: object) -> str:
    """Return what a headway command prints about a run."""
    return finished(
        [str(part) for part in (sandbox.python, "-m", "headway.cli", *arguments)],
        sandbox.scratch,
        {**sandbox.environment(sandbox.scratch), "NO_COLOR": "1"},
    )


def measure(row: Row, scripts: Path | None) -> dict:
    """Return the row's figures. Raises `RowError` when the script cannot be run as it is meant to.

    Counts and what is printed are those of a run without headway. Seconds are compared within one run, which has both
    headway and the clock: on a busy host two runs differ by more than what is asked about.
    """
    with tempfile.TemporaryDirectory(prefix="headway-world-") as name:
        sandbox = Sandbox.of(row, Path(name), scripts)
        plain = plainly(sandbox, "plain", clock=True)
        timed = under_headway(sandbox, "timed", clock=True)
        seen = under_headway(sandbox, "seen")
        why = json.loads(asked(sandbox, "why", "--json", seen.run))
        answer = {
            "version": version(sandbox),
            "losses_equal": seen.lines == plain.lines,
            **counts(row, plain.clock, why),
            **seconds(row, timed.clock, json.loads(asked(sandbox, "why", "--json", timed.run))),
            "verdict": verdict(asked(sandbox, "why", seen.run)),
            **remedied(sandbox, seen, plain.lines),
        }
        equal = answer["losses_equal"] and answer["applied_losses_equal"] is not False
        answer["deterministic"] = equal or plainly(sandbox, "again").lines == plain.lines
    return {**answer, "met": met(answer)}


def version(sandbox: Sandbox) -> str:
    """Return the version of the row's package, or the commit of its checkout where the folder names one."""
    if sandbox.row.public:
        head = sandbox.checkout / "COMMIT" if sandbox.checkout else None
        return head.read_text().strip()[:7] if head and head.exists() else ""
    code = f"from importlib.metadata import version; print(version({sandbox.row.package!r}))"
    return finished([str(sandbox.python), "-c", code], sandbox.scratch, dict(os.environ)).strip()


def counts(row: Row, clock: Clocked, why: Mapping[str, Any]) -> dict:
    """Return headway's steps and devices beside the true ones."""
    true_steps = clock.counts[row.counted] / row.per_step / row.devices
    return {
        "steps": [why["steps"], int(true_steps) if true_steps.is_integer() else true_steps],
        "expected_steps": row.steps or int(true_steps),
        "devices": [why["devices"], row.devices],
    }


def seconds(row: Row, clock: Clocked, why: Mapping[str, Any]) -> dict:
    """Return what headway books beside what the clock saw in the same run."""
    wall_s = why["devices"] * why["wall_s"]
    books = {
        "eval": why["ledger"].get("eval", 0.0),
        "script": why["sub"].get("host.script", 0.0),
        "input": why["ledger"]["input"],
    }
    books["either"] = books["eval"] + books["script"]
    truth = {**{kind: clock.span_s.get(kind, 0.0) for kind in row.spans}, "input": clock.counts["next_s"]}
    return {
        "wall_s": round(why["wall_s"], 2),
        "seconds": {kind: [round(books[kind], 2), round(truth[kind], 2)] for kind in truth},
        "points_off": {kind: round(100 * (books[kind] - truth[kind]) / wall_s, 1) for kind in truth},
    }


def verdict(text: str) -> str:
    """Return the sentence in which `headway why` sums the run up."""
    paragraphs = [paragraph.strip() for paragraph in text.split("\n\n")]
    return " ".join(paragraphs[1].split()) if len(paragraphs) > 1 else ""


def remedied(sandbox: Sandbox, seen: Pass, plain: list[str]) -> dict:
    """Return what headway's own plan promises and what it gives; the losses must stay."""
    plan = sandbox.scratch / "plan.json"
    nothing = {"remedies": [], "promised": None, "measured": None, "applied_losses_equal": None, "left": []}
    try:
        planned = json.loads(asked(sandbox, "plan", "--json", seen.run, "-o", plan))
    except RowError as error:  # a run without steps has no plan
        return {**nothing, "no_plan": str(error).strip().splitlines()[-1]}
    if not planned["chosen"]:
        return nothing
    after = under_headway(sandbox, "applied", "--apply", plan)
    before_s, after_s = (part.answer.get("steps_per_s") or 0.0 for part in (seen, after))
    return {
        "remedies": planned["chosen"],
        "promised": round(planned["predicted_speedup"], 2),
        "measured": round(after_s / before_s, 2) if before_s else None,
        "applied_losses_equal": after.lines == plain,
        "left": left(after.answer["applied"]),
    }


def left(applied: list[Mapping[str, Any]]) -> list[str]:
    """Return why remedies were refused or withdrawn, wholly or for one loader; nothing where all stayed in force."""
    reasons = [row.get(key) for row in applied for key in ("reason_not_applied", "withdrawn")]
    loaders = [loader for row in applied for loader in (row.get("facts") or {}).get("loaders", [])]
    return sorted({str(reason) for reason in [*reasons, *(row.get("reason_not_applied") for row in loaders)] if reason})


def met(answer: dict) -> bool:
    """Tell whether the row is as it should be: steps, devices, losses, names of seconds."""
    steps, true_steps = answer["steps"]
    return (
        steps == true_steps == answer["expected_steps"]
        and answer["devices"][0] == answer["devices"][1]
        and (answer["losses_equal"] or not answer["deterministic"])
        and (answer["applied_losses_equal"] in (True, None) or not answer["deterministic"])
        and all(abs(points) <= BAR_POINTS for points in answer["points_off"].values())
    )


def failed(error: Exception) -> dict:
    """Return the row of a script that could not be run."""
    return {"met": False, "failed": " ".join(str(error).split())[-1200:]}
