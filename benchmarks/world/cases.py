"""One case: a small script of known truth, plain and under headway, with remedies forced upon it, against its entry."""

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path

import msgspec
from _command import ROOT, python_path
from peers.env import layered

from headway.core.files.planfile import PlanFile, Remedy
from world.measure import finished

BAR_POINTS = 3.0
"""How far a line may be from the truth, in percent of device wall."""

LIMIT_S = 240
REMEDIES = {
    "data.threads": {"num_workers": 4, "prefetch_factor": 2},
    "data.workers": {"num_workers": 2, "prefetch_factor": 2, "persistent_workers": True},
}
"""Remedy -> the parameters with which a case has it forced upon it."""


class Case(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of cases.toml, which explains the fields."""

    file: str
    steps: int
    devices: int = 1
    ranks: int = 1
    exit: int = 0
    seconds: Mapping[str, float] = {}
    at_most: Mapping[str, float] = {}
    remedies: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    never_says: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """Devices of the account: one per rank, or as many as the script makes by itself."""
        return max(self.devices, self.ranks)


def table() -> dict[str, Case]:
    """Return number of the case ("03") -> its entry."""
    entries = tomllib.loads(Path(__file__).with_name("cases.toml").read_text())["case"]
    return {entry["file"][:2]: msgspec.convert(entry, Case) for entry in entries}


def interpreter(case: Case) -> Path:
    """Return the interpreter of a case: a notebook needs an environment with a kernel."""
    return layered("world/notebook") if case.file.endswith(".ipynb") else Path(sys.executable)


def run(command: list[object], folder: Path, case: Case) -> str:
    """Run a command and return its stdout. Raises `RowError` when it exits otherwise than the case says."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("HEADWAY_")}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(ROOT), "NO_COLOR": "1"}
    return finished([str(part) for part in command], folder, env, code=case.exit)


def plain(case: Case, script: Path, folder: Path) -> list[str]:
    """Return the sorted lines that the script prints without headway."""
    if case.file.endswith(".ipynb"):
        return printed_by_notebook(run([interpreter(case), *notebook(script)], folder, case))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", case.ranks] if case.ranks > 1 else []
    return sorted(run([interpreter(case), *launcher, script], folder, case).splitlines())


def notebook(script: Path) -> list[object]:
    """Return the arguments with which an interpreter executes a notebook and prints it."""
    return ["-m", "nbconvert", "--to", "notebook", "--execute", "--stdout", script]


def printed_by_notebook(text: str) -> list[str]:
    """Return the sorted lines of all streams of an executed notebook."""
    outputs = [output for cell in json.loads(text)["cells"] for output in cell.get("outputs", [])]
    return sorted("".join("".join(output.get("text", "")) for output in outputs).splitlines())


def recorded(case: Case, script: Path, folder: Path, name: str, *options: object) -> tuple[Path, list[str]]:
    """Run the case under headway; return the run folder and the sorted lines that the script printed."""
    out = folder / name
    ranks = ["--nproc-per-node", case.ranks] if case.ranks > 1 else []
    is_notebook = case.file.endswith(".ipynb")
    module, *rest = notebook(script) if is_notebook else ["", script]
    program = [module, "--", *rest] if is_notebook else ["--", *rest]
    run(
        [interpreter(case), "-m", "headway.cli", "run", "--quiet", "--out", out, *ranks, *options, *program],
        folder,
        case,
    )
    printed = [path.read_text() for path in sorted((out / "logs").glob("r*.out"))]
    lines = printed_by_notebook(printed[0]) if is_notebook else sorted("\n".join(printed).splitlines())
    return out, [line for line in lines if line]


def asked(case: Case, folder: Path, *arguments: object) -> str:
    """Return what a headway command prints about a run."""
    command = [str(part) for part in (sys.executable, "-m", "headway.cli", *arguments)]
    env = {**os.environ, "NO_COLOR": "1", "PYTHONPATH": python_path(ROOT)}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT_S).stdout


def booked(why: dict, lines: str) -> float:
    """Return the device-seconds of "a+b", each a bucket or a line of one."""
    return sum({**why["sub"], **why["ledger"]}.get(name, 0.0) for name in lines.split("+"))


def measure(case: Case, scripts: Path) -> dict:
    """Run the case; return what is wrong beside the figures. An empty `wrong` means that the case is met."""
    script = scripts / case.file
    with tempfile.TemporaryDirectory(prefix="headway-case-") as name:
        folder = Path(name)
        expected = [line for line in plain(case, script, folder) if line]
        out, lines = recorded(case, script, folder, "seen")
        why = json.loads(asked(case, folder, "why", "--json", out))
        wrong = misbooked(case, why, asked(case, folder, "why", out))
        if lines != expected:
            wrong.append(f"printed {lines}, not {expected}")
        applied = {}
        for remedy, lines in with_remedies(case, script, folder, out):
            applied[remedy] = lines == expected
            if lines != expected:
                wrong.append(f"with {remedy}: printed {lines}, not {expected}")
    wall_s = why["devices"] * why["wall_s"]
    points = {line: round(100 * (booked(why, line) - true_s) / wall_s, 1) for line, true_s in case.seconds.items()}
    return {
        "steps": [why["steps"], case.steps], "devices": [why["devices"], case.world_size],
        "wall_s": round(why["wall_s"], 2), "points_off": points, "applied_equal": applied, "wrong": wrong,
        "met": not wrong,
    }  # fmt: skip


def misbooked(case: Case, why: dict, text: str) -> list[str]:
    """Return what is wrong with an account: steps, devices, lines further off than the bar, words."""
    wall_s = why["devices"] * why["wall_s"]
    allowed_s = BAR_POINTS / 100 * wall_s
    off = {line: booked(why, line) - true_s for line, true_s in case.seconds.items()}
    over = {line: booked(why, line) - most_s for line, most_s in case.at_most.items()}
    return [
        *([f"{why['steps']} steps, not {case.steps}"] if why["steps"] != case.steps else []),
        *([f"{why['devices']} devices, not {case.world_size}"] if why["devices"] != case.world_size else []),
        *(f"{line}: {gap:+.2f} s of {wall_s:.1f} s" for line, gap in off.items() if abs(gap) > allowed_s),
        *(f"{line}: {gap:.2f} s too much" for line, gap in over.items() if gap > 0),
        *(f"does not say {word!r}" for word in case.says if word not in text),
        *(f"says {word!r}" for word in case.never_says if word in text),
    ]


def with_remedies(case: Case, script: Path, folder: Path, out: Path):
    """Yield (name, the script's lines) with headway's own plan, where there is one, and with each forced remedy."""
    planned = asked(case, folder, "plan", "--json", out, "-o", folder / "plan.json")
    if planned and json.loads(planned)["chosen"]:
        _, lines = recorded(case, script, folder, "planned", "--apply", folder / "plan.json")
        yield "its own plan", lines
    for name in case.remedies:
        plan = folder / f"{name}.json"
        plan.write_text(
            json.dumps(
                PlanFile(
                    (Remedy(name, REMEDIES[name], allow="data.threads" if name == "data.threads" else None),)
                ).to_json()
            )
        )
        _, lines = recorded(case, script, folder, f"with-{name}", "--apply", plan)
        yield name, lines
