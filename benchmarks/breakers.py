"""Scripts written to break remedies: each ends with the digits of plain python, or the remedy is refused.

Claim: of all scripts in benchmarks/breakers, none prints other digits, crashes, hangs or leaves a process behind under
any remedy that it attacks, neither with a forced plan file of aggressive parameters nor with headway's own plan.
Peer: the same script under plain python. Scripts of a kind are the cases of one file, each a function whose docstring
says what it attacks, and with which remedies; remedies that need a grant get it. Under data.server, which may change
the order, the multiset of rows is compared.

`python benchmarks/breakers.py NAME ... --remedy data.workers` runs some of them; without names a few, `--full` all.
"""

import argparse
import ast
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _command import ROOT, python_path

SCRIPTS = ROOT / "benchmarks" / "breakers"

FORCED: dict[str, dict[str, object]] = {
    "data.workers": {"num_workers": 4, "prefetch_factor": 4, "persistent_workers": True, "max_workers": 4},
    "data.threads": {"num_workers": 4, "prefetch_factor": 4},
    "data.cache": {"bytes": 1 << 26},
    "data.server": {"cache_bytes": 1 << 26, "idle_s": 0.5},
    "cluster.noise": {},
    "comm.bucket": {"bucket_mb": 0.001},
    "comm.gradient_view": {},
    "comm.static_graph": {},
    "comm.order": {"ahead": 2},
    "checkpoint.async": {"every_steps": 1},
    "fault.interval": {"mtbf_s": 60.0},
    "fault.warm": {},
    "parallel.schedule": {"order": ["0F0,0F1,0F2,0F3,0I0,0W0,0I1,0W1,0I2,0W2,0I3,0W3",
                                    "1F0,1I0,1F1,1I1,1F2,1I2,1W0,1F3,1I3,1W1,1W2,1W3"]},
    "host.gc": {"every_steps": 5},
    "host.logging": {"queue": 64},
    "power.filler": {"on_after_s": 0.005, "off_within_s": 0.002, "level": 0.5},
}  # fmt: skip
"""Remedy -> the parameters that it is forced on scripts with."""

GRANTED = {"data.server": "result-equivalent", "checkpoint.async": "result-equivalent", "data.threads": "data.threads"}
"""Remedy -> the grant with which it acts; others that need one are right only for some scripts: refused."""

OWN_PLAN = "own plan"
"""The column of `headway run`, `headway plan`, `headway run --apply`."""

DEFAULT = ("plain_rows", "curriculum_in_batch_sampler", "global_ratio", "collate_counter")
"""Scripts that are run when none is named: one that remedies suit, three that they must leave alone."""

TIME_LIMIT_S = 60.0
"""A run that takes this much longer than ten runs of plain python counts as hung: the machine may be busy."""

BAD = ("changed", "crashed", "hung", "left behind")
"""Outcomes that must not be."""

MARK = "HEADWAY_BREAKER"
"""Environment variable by which the processes of a run are found once it is over."""

PREFIX = re.compile(r"^\[default\d+\]:", re.MULTILINE)
"""What `headway run` writes before the lines of one rank of several."""


@dataclass(frozen=True, slots=True)
class Breaker:
    """One script and what it says of itself."""

    name: str
    attacks: str
    """First line of its docstring."""
    remedies: tuple[str, ...]
    ranks: int
    path: Path

    @property
    def command(self) -> tuple[object, ...]:
        """The file and its argument: what comes behind `python`."""
        return self.path, self.name


@dataclass(frozen=True, slots=True)
class Ended:
    """How one run of a script ended."""

    code: int | None
    """Exit code; None when it took too long."""
    out: str
    error: str
    left: tuple[str, ...]
    """Command lines of processes that outlived the run, and were ended then."""
    wall_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """A script under a remedy."""

    script: str
    remedy: str
    outcome: str
    """equal (applied), refused, nothing to apply, or one of `BAD`."""
    detail: str = ""
    """Why it was refused; what differs."""


def breakers() -> dict[str, Breaker]:
    """Return script name -> what its docstring says, or that of its file."""
    found = {}
    for path in sorted(SCRIPTS.glob("[a-z]*.py")):
        file = ast.parse(path.read_text())
        common = facts_of(file)
        for case in file.body:
            if isinstance(case, ast.FunctionDef) and not case.args.args and (text := ast.get_docstring(case)):
                facts = {**common, **facts_of(case)}
                if remedies := tuple(facts.get("Remedies", "").split()):
                    attacks, ranks = text.splitlines()[0], int(facts.get("Ranks", 1))
                    found[case.name] = Breaker(case.name, attacks, remedies, ranks, path)
    return found


def facts_of(node: ast.Module | ast.FunctionDef) -> dict[str, str]:
    """Return name -> value of the lines `NAME: VALUE` below the first of a docstring."""
    lines = (ast.get_docstring(node) or "").splitlines()
    return dict(line.split(": ", 1) for line in lines[1:] if ": " in line)


def plan_text(remedy: str) -> str:
    """Return a plan file that forces one remedy."""
    row = {"name": remedy, "parameters": FORCED[remedy], "predicted_speedup": 2.0, "interval": [1.0, 3.0]}
    return json.dumps({"schema": "headway.plan-file/1", "remedies": [{**row, "allow": GRANTED.get(remedy)}]})


def started(command: Sequence[object], folder: Path, *, limit_s: float = 300.0, **env: str) -> Ended:
    """Run a command in `folder` to its end, or to the time limit, and end what it leaves behind."""
    mark, began = uuid.uuid4().hex, time.monotonic()
    names = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(ROOT), MARK: mark, **env}
    with (folder / "out").open("w+") as out, (folder / "error").open("w+") as error:
        process = subprocess.Popen(list(map(str, command)), cwd=folder, env=names, stdout=out, stderr=error)
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        wall_s = time.monotonic() - began
        left = _left_behind(mark, patience_s=0.0 if code is None else 5.0)
        process.wait()
    return Ended(code, (folder / "out").read_text(), (folder / "error").read_text(), left, wall_s)


def _left_behind(mark: str, *, patience_s: float) -> tuple[str, ...]:
    """Return the command lines of processes of a run that are there after `patience_s`, and end them."""
    last = time.monotonic() + patience_s
    while (alive := dict(_marked(mark))) and time.monotonic() < last:
        time.sleep(0.1)
    for number in alive:
        try:
            os.kill(number, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return tuple(alive.values())


def _marked(mark: str) -> Iterator[tuple[int, str]]:
    """Yield pid and command line of every process whose environment carries the mark."""
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (place / "environ").read_bytes():
                yield int(place.name), (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue


def plain(breaker: Breaker, folder: Path) -> Ended:
    """Run a script as its author would; two ranks meet at a file."""
    if breaker.ranks == 1:
        return started([sys.executable, *breaker.command], folder)
    store = f"file://{folder}/store"

    def rank(number: int) -> Ended:
        place = folder / f"rank{number}"
        place.mkdir()
        names = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": breaker.ranks, "STORE": store, "TOGETHER": folder}
        return started([sys.executable, *breaker.command], place, **{name: str(value) for name, value in names.items()})

    with ThreadPoolExecutor(breaker.ranks) as pool:
        return next(iter(list(pool.map(rank, range(breaker.ranks)))))


def recorded(breaker: Breaker, folder: Path, expected: Ended, *options: object) -> Ended:
    """Run a script under `headway run OPTIONS`; its stdout is the script's alone."""
    ranks = [] if breaker.ranks == 1 else ["--nproc-per-node", breaker.ranks]
    command = [sys.executable, "-m", "headway.cli", "run", "--quiet", *ranks, *options, "--", *breaker.command]
    ended = started(command, folder, limit_s=TIME_LIMIT_S + 10 * expected.wall_s, TOGETHER=str(folder))
    return replace(ended, out=PREFIX.sub("", ended.out))


def attempt(breaker: Breaker, remedy: str, expected: Ended) -> Row:
    """Run a script with a forced remedy, or with headway's own plan, and say what came of it."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        plan = folder / "plan.json"
        if remedy == OWN_PLAN:
            before = recorded(breaker, folder, expected, "--out", folder / "before")
            if (fault := difference(before, expected, remedy)) is not None:
                return Row(breaker.name, "recording alone", *fault)
            command = [sys.executable, "-m", "headway.cli", "plan", folder / "before", "-o", plan, "--json"]
            made = started(command, folder)
            chosen = json.loads(made.out)["chosen"] if made.code == 0 else None
            if not chosen:
                return Row(breaker.name, remedy, "nothing to apply", "" if chosen == [] else made.error[-300:].strip())
        else:
            plan.write_text(plan_text(remedy))
        ended = recorded(breaker, folder, expected, "--apply", plan, "--out", folder / "after")
        if (fault := difference(ended, expected, remedy)) is not None:
            return Row(breaker.name, remedy, *fault)
        return Row(breaker.name, remedy, *applied(folder / "after"))


def difference(ended: Ended, expected: Ended, remedy: str) -> tuple[str, str] | None:
    """Return outcome and detail where a run is not what plain python gave; None when it is."""
    if ended.code is None:
        return "hung", f"no end after {ended.wall_s:.0f} s; plain python takes {expected.wall_s:.0f} s"
    if ended.left:
        return "left behind", "; ".join(ended.left)[:300]
    if ended.code != expected.code:
        return "crashed", f"exit {ended.code} and not {expected.code}: {ended.error[-600:].strip()}"
    got, wanted = ([compared(line, remedy) for line in run.out.splitlines()] for run in (ended, expected))
    if got != wanted:
        lines = [pair for pair in zip(got, wanted, strict=False) if pair[0] != pair[1]]
        return (
            "changed",
            f"{lines[0][0]!r} and not {lines[0][1]!r}" if lines else f"{len(got)} lines, not {len(wanted)}",
        )
    return None


def compared(line: str, remedy: str) -> str:
    """Return what of a line must be equal: a server may give the rows in another order, and so other losses."""
    return line if remedy != "data.server" or line.startswith("examples") else ""


def applied(run: Path) -> tuple[str, str]:
    """Return whether a run applied its remedies, and the reasons of those that it refused."""
    rows = json.loads((run / "applied" / "r0.json").read_text())["remedies"]
    loaders = [loader for row in rows for loader in row["facts"].get("loaders", ())]
    reasons = [fact["reason_not_applied"] for fact in [*rows, *loaders] if fact.get("reason_not_applied")]
    outcome = "equal" if any(row["applied"] for row in rows) else "refused"
    return outcome, "; ".join(dict.fromkeys(reasons))


def attack(breaker: Breaker, remedies: Sequence[str]) -> list[Row]:
    """Run a script plain, then under each of `remedies` that it attacks; its own digits must come twice the same."""
    with tempfile.TemporaryDirectory() as place:
        expected = plain(breaker, Path(place))
    if expected.code is None or "loss" not in expected.out or expected.left:
        return [
            Row(breaker.name, "plain python", "crashed", f"{expected.code} {expected.left} {expected.error[-600:]}")
        ]
    wanted = [remedy for remedy in (*breaker.remedies, OWN_PLAN) if remedy in remedies]
    return [attempt(breaker, remedy, expected) for remedy in wanted]


def main() -> int:
    """Attack, and print the verdict as one JSON line."""
    known = breakers()
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("names", nargs="*", choices=[*known, []], metavar="NAME")
    options.add_argument("--full", action="store_true", help="every script, and headway's own plan for each")
    options.add_argument("--remedy", action="append", choices=[*FORCED, OWN_PLAN], help="only this one")
    options.add_argument("--jobs", type=int, default=2, help="scripts at a time")
    chosen = options.parse_args()
    names = list(known) if chosen.full else chosen.names or DEFAULT
    remedies = chosen.remedy or [*FORCED, *([OWN_PLAN] if chosen.full or chosen.names else [])]
    rows: list[Row] = []
    with ThreadPoolExecutor(chosen.jobs) as pool:
        for found in pool.map(lambda name: attack(known[name], remedies), names):
            for row in found:
                print(f"{row.script:32} {row.remedy:18} {row.outcome:16} {row.detail}", file=sys.stderr, flush=True)
            rows += found
    bad = [row for row in rows if row.outcome in BAD]
    counts = Counter(row.outcome for row in rows)
    reasons = Counter(f"{row.remedy}: {row.detail}" for row in rows if row.outcome == "refused")
    print(json.dumps({
        "bench": "breakers", "scripts": len(names), "runs": len(rows),
        "applied_and_equal": counts["equal"], "refused": counts["refused"],
        "nothing_to_apply": counts["nothing to apply"], **{name.replace(" ", "_"): counts[name] for name in BAD},
        "failures": [asdict(row) for row in bad], "reasons": dict(reasons.most_common()),
        "peer": "plain python", "claim": "0 changed, 0 crashed, 0 hung, 0 left behind", "met": not bad,
    }))  # fmt: skip
    return 3 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
