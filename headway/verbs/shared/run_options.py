"""What verbs take: the options of `headway run`, torchrun's where it has them, sizes, paths; the run one is about."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter, Token, convert

from headway.catalog import SUPERVISOR
from headway.core.errors import InputError
from headway.core.files.safe_files import read_json
from headway.core.units import parse_bytes
from headway.runtime.launching.options import LaunchOptions
from headway.runtime.run_folder.recording import RUNS
from headway.trace.recording.runs import Run, is_run, run_near

JOB, PLAN = Group("The run", sort_key=1), Group("A plan", sort_key=2)
RECORD, FAIL = Group("What is recorded", sort_key=3), Group("Failures and restarts", sort_key=4)
RANKS = Group("Ranks and hosts, as torchrun has them", sort_key=5)
"""The groups of `headway run --help`."""


def _help(group: Group, text: str) -> Parameter:
    return Parameter(help=text, group=group)


def _whole(group: Group, text: str) -> Parameter:
    return Parameter(help=text, group=group, converter=whole_number)


def whole_number(kind: Any, tokens: Sequence[Token]) -> int:
    """Return the number that an option was given; raises `ValueError` for 1.5, which cyclopts itself would round."""
    text = tokens[0].value
    if re.fullmatch(r"[-+]?\d*\.\d*[1-9]\d*", text):
        whole = round(float(text))
        raise ValueError(f"{text} is not a whole number. Pass {whole if whole > 0 else 'one'}.")
    return int(convert(int, tokens))


def size(_: object, tokens: Sequence[Token]) -> str:
    """Return the size that an option was given, as written. Raises `InputError` for what is not a number of bytes."""
    parse_bytes(tokens[0].value)
    return tokens[0].value


Size = Annotated[str, Parameter(converter=size)]
"""A size such as 8GiB."""


def given_path(_: object, tokens: Sequence[Token]) -> Path:
    """Return the path that an argument names. Raises `InputError` for "", which is no path.

    A shell puts "" where a variable is not set: as a path it would mean the current folder.
    """
    if not tokens[0].value:
        name, what = (tokens[0].keyword, "path") if tokens[0].keyword else ("a run's path", "run folder")
        raise InputError(f"{name} is empty. Name a {what}, or check that the shell's variable is set.")
    return Path(tokens[0].value)


GivenPath = Annotated[Path, Parameter(converter=given_path)]
"""The path that an option names."""

OutPath = Annotated[Path, Parameter(alias="-o", converter=given_path)]
"""The option --out of a verb."""


def fraction(_: object, tokens: Sequence[Token]) -> float:
    """Return what `5%` or `0.05` says. Raises `InputError` for anything else."""
    text = tokens[0].value.strip()
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = math.nan
    name = tokens[0].keyword or "the threshold"
    if not math.isfinite(value):
        raise InputError(f"{name} is {text!r}; it is a fraction. Pass 5% or 0.05.")
    if value > 1 and not text.endswith("%"):
        raise InputError(f"{name} is {text}, which is {100 * value:g} %. Pass {text}% or {value / 100:g}.")
    return value / (100 if text.endswith("%") else 1)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What `headway run` takes before the `--`."""

    nproc_per_node: Annotated[
        str | None,
        _help(RANKS, "Ranks on this host: a number, auto, cpu or gpu. Without it, one, started as python does."),
    ] = None
    nnodes: Annotated[str, _help(RANKS, "Hosts: a number or MIN:MAX.")] = "1"
    node_rank: Annotated[int, _whole(RANKS, "Index of this host, for the static rendezvous.")] = 0
    rdzv_backend: Annotated[str, _help(RANKS, "Rendezvous of several hosts, as torchrun's.")] = "static"
    rdzv_endpoint: Annotated[str, _help(RANKS, "HOST:PORT of the rendezvous.")] = ""
    rdzv_id: Annotated[str, _help(RANKS, "Name of the job at the rendezvous.")] = "none"
    rdzv_conf: Annotated[str, _help(RANKS, "KEY=VALUE pairs with commas between them.")] = ""
    standalone: Annotated[bool, _help(RANKS, "Accepted for torchrun's sake: one host needs no rendezvous.")] = False
    max_restarts: Annotated[int, _whole(FAIL, "Attempts after the first one.")] = 0
    standby: Annotated[
        int,
        _whole(
            FAIL, "Hosts beyond --nnodes that wait in reserve at the c10d rendezvous, and take the place of one gone."
        ),
    ] = 0
    warm: Annotated[
        str,
        _help(
            FAIL,
            "auto: later attempts start from a process that has imported what the script imports, where that is the "
            "same; off: each one starts cold.",
        ),
    ] = "auto"
    update_from: Annotated[
        GivenPath | None,
        _help(FAIL, "Folder with newer code: later attempts run a copy of it, and go back if it fails twice."),
    ] = None
    monitor_interval: Annotated[float, _help(RANKS, "Seconds between looks at the ranks of several hosts.")] = 0.1
    master_addr: Annotated[str, _help(RANKS, "Address of rank 0's store.")] = "127.0.0.1"
    master_port: Annotated[int | None, _whole(RANKS, "Its port; a free one by default.")] = None
    local_addr: Annotated[str | None, _help(RANKS, "Address of this host.")] = None
    role: Annotated[str, _help(RANKS, "Role of the ranks.")] = "default"
    log_dir: Annotated[GivenPath | None, _help(JOB, "Where the ranks' output is kept; RUN/logs by default.")] = None
    module: Annotated[bool, Parameter(group=JOB, alias="-m", help="The script is a module, as in python -m.")] = False
    no_python: Annotated[bool, _help(JOB, "The script is a program of its own.")] = False
    out: Annotated[GivenPath | None, _help(JOB, "The run folder; headway-runs/SCRIPT-N by default.")] = None
    mode: Annotated[
        str, _help(JOB, "Who else may read the run folder and its logs, as chmod's number; 750 for your group.")
    ] = "700"
    apply: Annotated[GivenPath | None, _help(PLAN, "A plan file, or the run folder whose plan to apply.")] = None
    verify: Annotated[
        bool | None,
        Parameter(
            group=PLAN,
            negative="--no-verify",
            help="With --apply: compare the first batch of each pass, every 100th, and the next one after a change of "
            "its data with the script's own, and exit with 3 if one differs. By default as many as 1 % of the time "
            "allows are compared, and a remedy that changed one is taken away; --no-verify compares none.",
        ),
    ] = None
    baseline: Annotated[GivenPath | None, _help(PLAN, "Run to compare with; by default the plan's own.")] = None
    no_launch: Annotated[
        bool, _help(RECORD, "Under torchrun, srun or accelerate: record this process as one rank.")
    ] = False
    windows: Annotated[
        float | None,
        Parameter(
            group=RECORD,
            converter=fraction,
            help="Fraction of run time that deep windows may cost, 0.05 or 5%; 0 for none. By default 0.01 where a "
            "device or several ranks compute: nothing is read from those of one process on a host.",
        ),
    ] = None
    window_at: Annotated[
        int | None,
        _whole(RECORD, "Open a deep window at this step too, whatever it costs: on a device the first one is late."),
    ] = None
    hang_timeout: Annotated[
        float | None,
        _help(FAIL, "End the run after so many seconds without progress; by default a hang is only reported."),
    ] = None
    grace_s: Annotated[float, _help(FAIL, "Seconds between SIGTERM and SIGKILL.")] = 30.0
    max_run_bytes: Annotated[Size, _help(JOB, "Most bytes the run folder may take.")] = "512MB"
    metrics_port: Annotated[
        int | None, _whole(RECORD, "Serve Prometheus metrics of this host's ranks; 0 takes a free port.")
    ] = None
    metrics_host: Annotated[str, _help(RECORD, "Address of the metrics; only this host can read them by default.")] = (
        "127.0.0.1"
    )
    quiet: Annotated[bool, _help(JOB, "No status line, no verdict; a failure's traceback still comes.")] = False
    json: Annotated[bool, _help(JOB, "Print one JSON object (headway.run/1); the script's stdout goes to stderr.")] = (
        False
    )

    @property
    def plan_path(self) -> Path | None:
        """The plan file that --apply means: the file itself, or the plan of a run folder. Raises `InputError`."""
        if self.apply is None or not self.apply.is_dir():
            return self.apply
        for name in ("next-plan.json", "plan.json"):  # the newer one first
            if (plan := self.apply / name).is_file():
                return plan
        if not is_run(self.apply):
            raise InputError(f"{self.apply} is neither a plan file nor a run folder. Name what headway plan wrote.")
        raise InputError(f"{self.apply} holds no plan.json. Write one with: headway plan {self.apply}")

    def launch_options(self, remedies: dict[str, str], baseline: Path | None) -> LaunchOptions:
        """Return what the launcher takes. Raises `InputError` for values that cannot be."""
        same = {name: getattr(self, name) for row in fields(LaunchOptions) if hasattr(self, name := row.name)}
        return LaunchOptions(**same | {
            "rdzv_conf": rendezvous_settings(self.rdzv_conf),
            "supervisor": SUPERVISOR,
            "apply": self.plan_path,
            "baseline": str(baseline) if baseline else None,
            "remedies": remedies,
            "hang_timeout_s": self.hang_timeout,
            "max_run_bytes": parse_bytes(self.max_run_bytes),
            "mode": folder_mode(self.mode),
        })  # fmt: skip


def folder_mode(text: str) -> int:
    """Parse --mode; raises `InputError`.

    >>> oct(folder_mode("750"))
    '0o750'
    """
    if re.fullmatch("0?7[0-7][0-7]", text) is None:
        raise InputError(f"--mode is {text!r}. Write what chmod takes for a folder of yours, from 700 to 777.")
    return int(text, 8)


def rendezvous_settings(text: str) -> dict[str, str]:
    """Parse torchrun's --rdzv-conf, 'key=value,key=value'; raises `InputError`.

    >>> rendezvous_settings("timeout=30,read_timeout=5")
    {'timeout': '30', 'read_timeout': '5'}
    """
    pairs = [part.split("=", 1) for part in text.split(",") if part]
    if any(len(pair) != 2 for pair in pairs):
        raise InputError(f"--rdzv-conf is {text!r}. Write key=value pairs with commas between them.")
    return {key.strip(): value.strip() for key, value in pairs}


@dataclass(frozen=True, kw_only=True)
class RecordingOptions(RunOptions):
    """Those of `headway run` itself, which alone can shorten --out: -o of other verbs is the plan that they write.

    The class stands in this file, since cyclopts reads all annotations of a class by the names of its module.
    """

    out: Annotated[OutPath | None, Parameter(group=JOB, help="The run folder; headway-runs/SCRIPT-N by default.")] = (
        None
    )
    wandb: Annotated[
        bool, _help(JOB, "Add verdict, ledger and page to the W&B run that the script opened, or WANDB_RUN_ID names.")
    ] = False
    mlflow: Annotated[
        bool, _help(JOB, "The same for the MLflow run that the script opened, or MLFLOW_RUN_ID names.")
    ] = False

    @property
    def trackers(self) -> list[str]:
        """The libraries that get the account once the script has ended."""
        return [name for name in ("wandb", "mlflow") if getattr(self, name)]


DEFAULTS = RunOptions()
GivenOptions = Annotated[RunOptions, Parameter(name="*")]
"""The options of `headway run`, of a verb that launches a script as it does."""

GivenScript = Annotated[list[str] | None, Parameter(parse=False)]
"""What stands behind `--`: a script and its arguments."""

AsModule = Annotated[bool, Parameter(alias="-m")]
"""The option --module of a verb that takes a script."""

Settings = Annotated[list[str], Parameter(name="--set", negative=())] | None
"""The option --set of a verb."""

RunPath = Annotated[Path, Parameter(converter=given_path)]
"""A run or a trace that a verb reads."""

NewestRun = Annotated[Path | None, Parameter(help="A run folder; the newest one by default.", converter=given_path)]
"""The argument RUN of a verb, as `run_at` takes it."""


def newest_run() -> Path:
    """Return the newest run folder of this directory. Raises `InputError` when there is none."""
    runs = recorded_runs()
    if not runs:
        raise InputError(
            f"there is no run in {RUNS.resolve()}. Record one with: headway run -- train.py, or name a run."
        )
    return runs[0]


def recorded_runs() -> list[Path]:
    """Return the run folders of this directory, the newest first."""
    runs = [path for path in RUNS.iterdir() if is_run(path)] if RUNS.is_dir() else []
    return sorted(runs, key=started_ns, reverse=True)


def recorded() -> str:
    """Say which runs this directory has, the newest first: 'There are headway-runs/train-2, headway-runs/train-1.'"""
    names = list(map(str, recorded_runs()))
    if not names:
        return f"There is none in {RUNS}: record one with headway run -- train.py."
    more = f" and {len(names) - MOST_NAMED} older ones" if len(names) > MOST_NAMED else ""
    return f"There {'are' if len(names) > 1 else 'is'} {', '.join(names[:MOST_NAMED])}{more}."


MOST_NAMED = 5
"""Runs that an error names."""


def started_ns(path: Path) -> int:
    """Return when the run at `path` began, in ns of the realtime clock.

    As recorded: a copy or an older run finalised late keeps its place. Where no fact was kept, when the folder changed.
    """
    for file in [path / "run.json", *sorted(path.glob("run-host*.json"))]:
        try:
            return int(read_json(file)["realtime_ns"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return path.stat().st_mtime_ns


def run_at(path: Path | None) -> Run:
    """Open the run folder at `path` (None = the newest). Raises `InputError` when it is not one."""
    path = path or newest_run()
    if not path.exists():
        raise InputError(f"{path} does not exist. Name a run folder. {recorded()}")
    if not is_run(path):
        raise InputError(f"{path} is not a run folder. {run_near(path) or 'Name one that headway run made.'}")
    return Run.open(path)
