"""What a launch is asked for: torchrun's options and headway's own, and which of them cannot work.

New code for a running job: later attempts run a copy of the script that was taken when the attempt before ended.

`headway run --update-from DIR`: a user changes the code in DIR while the job trains, and the next restart, whatever
its reason, runs it from RUN/code/<n>. A copy, so that what an attempt runs does not change under it, and can be gone
back from: an update that fails in the same words twice is undone, and not taken again until DIR changes.

>>> code = CodeUpdates(None, Path("run"), ["train.py", "--lr", "1"], say=print)
>>> code.take(), code.script, code.updated
(None, ['train.py', '--lr', '1'], False)
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headway.core.errors import InputError
from headway.core.files.private import PRIVATE
from headway.core.tables import pick
from headway.runtime.host import rank_env
from headway.runtime.run_folder.recording import DEFAULT_MAX_RUN_BYTES

FOLDER = "code"
"""Of a run folder: the copies."""

IGNORED = ("__pycache__", ".git", "headway-runs")
"""Folders that hold no code."""


class CodeUpdates:
    """Which script the next attempt runs."""

    def __init__(self, source: Path | None, run: Path, script: Sequence[str], *, say: Callable[[str], None]) -> None:
        """`source` is the folder with newer code, None = there is none; `say` prints one line."""
        self._source, self._folder, self._say = source, run / FOLDER, say
        self._versions = [list(script)]
        self._stamp: object = None

    @property
    def script(self) -> list[str]:
        """The script and its arguments."""
        return self._versions[-1]

    @property
    def updated(self) -> bool:
        """Whether it is newer than the one that the job began with."""
        return len(self._versions) > 1

    def take(self) -> None:
        """Copy the code, if it has changed; what cannot be copied leaves the job with what it has."""
        if self._source is None:
            return
        first = self._versions[0]
        try:
            stamp = _stamp(self._source)
            if stamp == self._stamp:
                return
            target = self._folder / str(sum(1 for _ in self._folder.glob("*")) + 1)
            shutil.copytree(self._source, target, ignore=shutil.ignore_patterns(*IGNORED))
        except (OSError, shutil.Error) as cause:
            self._say(f"the code in {self._source} could not be taken, the job goes on with what it has: {cause}")
            return
        self._stamp = stamp
        script = target / Path(first[0]).name
        if script.is_file():
            self._versions.append([str(script), *first[1:]])
            self._say(f"the next attempt runs {script}, a copy of {self._source}")
        else:
            self._say(f"{self._source} holds no {script.name}; the job goes on with the code that it has")

    def undo(self) -> None:
        """Go back to the code before the last update."""
        if self.updated:
            self._versions.pop()
            self._say(f"the last update of the code is undone; the next attempt runs {self.script[0]}")


def _check_script(script: Sequence[str]) -> None:
    """Raise `InputError` unless Python can run the first word: a file, or a folder with a __main__.py."""
    path = Path(script[0])
    if not script[0] or not path.exists():
        module = " ".join(["--module --", *script[1:2]])
        is_flag = script[0] in ("-m", "--module")
        fix = "Check its name." if path.suffix == ".py" else "Name a script: headway starts Python itself."
        fix = f"For a module write: headway run {module}" if is_flag else fix
        raise InputError(f"the script {script[0]!r} does not exist in {Path.cwd()}. {fix}")
    if path.is_dir() and not (path / "__main__.py").exists():
        raise InputError(f"{script[0]} is a folder without a __main__.py. Name a script in it.")


def check_source(source: Path, script: str) -> None:
    """Raise `InputError` unless newer versions of `script` can come from the folder `source`."""
    if not source.is_dir():
        raise InputError(f"--update-from {source} is not a folder. Name the one with the newer code.")
    if source.resolve() == Path(script).resolve().parent:
        raise InputError(
            f"--update-from {source} is the folder that the job runs from. Copy the code elsewhere and change it there."
        )


def _stamp(source: Path) -> list[tuple[str, int, int]]:
    """Return what changes when a file of the folder does."""
    found = []
    for path in sorted(source.rglob("*")):
        if path.is_file() and not {*path.relative_to(source).parts} & {*IGNORED}:
            facts = path.stat()
            found.append((str(path), facts.st_mtime_ns, facts.st_size))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """What `headway run` was asked for; names and meanings of the first block are torchrun's."""

    nproc_per_node: int | str | None = None
    """Ranks on this host: a number, 'auto', 'gpu' or 'cpu'; None = one."""
    nnodes: int | str = 1
    """Hosts: a number or '<min>:<max>'."""
    node_rank: int = 0
    """Index of this host, for the static rendezvous."""
    rdzv_backend: str = "static"
    rdzv_endpoint: str = ""
    """host:port of the rendezvous."""
    rdzv_id: str = "none"
    rdzv_conf: Mapping[str, str | int | float] = field(default_factory=dict)
    max_restarts: int = 0
    standby: int = 0
    """Hosts beyond `nnodes` that wait in reserve, for the c10d rendezvous."""
    monitor_interval: float = 0.1
    """Seconds between looks at the ranks of several hosts; on one host an exit is seen at once."""
    standalone: bool = False
    """Accepted for torchrun's sake: one host never needs a rendezvous here."""
    supervisor: str = ""
    """'module:function' that makes what supervises restarts, from the catalog; '' = every restart is a plain one."""
    warm: str = "auto"
    """auto: later attempts are forked from a process that has imported what the ranks import, where that is the same;
    off: each one starts cold."""
    update_from: Path | None = None
    """Folder with newer code, of which later attempts on one host run a copy."""
    master_addr: str = "127.0.0.1"
    master_port: int | None = None
    """Port of rank 0's store; None = a free one per attempt."""
    local_addr: str | None = None
    role: str = "default"
    module: bool = False
    no_python: bool = False
    log_dir: Path | None = None
    """Where the ranks' output is kept; None = RUN/logs."""

    out: Path | None = None
    """Run folder; None = ./headway-runs/<script>-<n>."""
    mode: int = PRIVATE
    """Mode of the folders that are made; logs and run.json are as open."""
    apply: Path | None = None
    """Plan file whose remedies the ranks apply."""
    verify: bool | None = None
    """Compare batches under a remedy with the script's own."""
    baseline: str | None = None
    """Run that the plan was made from, for the comparison."""
    remedies: Mapping[str, str] = field(default_factory=dict)
    """Remedy name -> 'module:tuple' that holds its record, from the catalog."""
    no_launch: bool = False
    """Join a launch line that exists already (torchrun, srun, accelerate): run the script as this rank."""
    windows: float | None = None
    """Fraction of run time that deep windows may cost; None = 0.01 where a device or several ranks compute, else 0."""
    window_at: int | None = None
    """Step at which one opens, whatever the budget says."""
    max_run_bytes: int = DEFAULT_MAX_RUN_BYTES
    hang_timeout_s: float | None = None
    """Seconds without progress after which the run is ended with class hang; None = a hang is only reported."""
    grace_s: float = 30.0
    """Seconds between SIGTERM and SIGKILL."""
    quiet: bool = False
    """No status line and no lines of our own; the traceback of a failure still comes."""
    json: bool = False
    """Ranks' stdout goes to stderr: stdout belongs to the one JSON object."""
    metrics_port: int | None = None
    """Port of this host's Prometheus endpoint; 0 = a free one, None = no endpoint."""
    metrics_host: str = "127.0.0.1"
    """Address that the endpoint is bound to."""

    @property
    def is_plain(self) -> bool:
        """Whether none of torchrun's flags is given: the script is started as `python script` would start it.

        Scripts that ask for RANK before they go distributed must not find one then.
        """
        return all(str(getattr(self, name)) == str(getattr(_PLAIN, name)) for name in TORCHRUN_FLAGS)


TORCHRUN_FLAGS = (
    "nproc_per_node", "nnodes", "node_rank", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "max_restarts",
    "standalone", "master_addr", "master_port", "local_addr", "role", "standby",
)  # fmt: skip
"""Options that only a job of several processes, hosts or attempts has."""

_PLAIN = LaunchOptions()


def check(options: LaunchOptions, script: Sequence[str]) -> tuple[int, int]:
    """Return (fewest, most) hosts after checking what can be checked before the start; raises `InputError`."""
    if not script:
        raise InputError("no script was given. Put it after --, as in: headway run -- train.py --lr 1e-3")
    if options.module and options.no_python:
        raise InputError("--module and --no-python exclude each other. Drop one of them.")
    if options.max_restarts < 0:
        raise InputError(f"--max-restarts is {options.max_restarts}; it must be at least 0. Pass 0 for no restart.")
    pick({"auto": 0, "off": 0}, options.warm, "--warm")
    if not options.grace_s >= 0:
        raise InputError(f"--grace-s is {options.grace_s}; it must be at least 0. Pass 30.")
    if options.hang_timeout_s is not None and not options.hang_timeout_s > 0:
        raise InputError(
            f"--hang-timeout is {options.hang_timeout_s}; it is seconds, above 0. Leave it out to have hangs reported."
        )
    if options.windows is not None and not 0 <= options.windows <= 1:
        raise InputError(f"--windows is {options.windows}; it is a fraction of run time from 0 to 1. Pass 0.01.")
    if options.window_at is not None and options.window_at < 2:
        raise InputError(f"--window-at is {options.window_at}; it is a step, 2 or later. Pass 50.")
    if options.window_at is not None and options.windows == 0:
        raise InputError("--window-at asks for a deep window, and --windows 0 rules it out. Leave out one of them.")
    if not options.module and not options.no_python:
        _check_script(script)
    if options.no_python and shutil.which(script[0]) is None:
        raise InputError(f"the program {script[0]!r} cannot be run. Check the path, or drop --no-python for a script.")
    if options.update_from is not None:
        if options.module or options.no_python or str(options.nnodes) != "1" or not options.max_restarts:
            raise InputError(
                "--update-from changes the script of later attempts on one host. Pass --max-restarts, and a script, "
                "without --module, --no-python and --nnodes."
            )
        check_source(options.update_from, script[0])
    if options.apply is not None and not options.apply.is_file():
        raise InputError(f"--apply {options.apply} is not a file. Write one with: headway plan RUN -o {options.apply}")
    if options.metrics_port is not None:
        _check_metrics(options, options.metrics_port)
    if options.standby < 0 or (options.standby and options.rdzv_backend != "c10d"):
        raise InputError(
            f"--standby is {options.standby} with --rdzv-backend {options.rdzv_backend}; hosts in reserve, 0 or more, "
            "wait at a c10d rendezvous. Pass --rdzv-backend c10d --rdzv-endpoint HOST:PORT, or drop --standby."
        )
    hosts = rank_env.parse_hosts(options.nnodes)
    if options.rdzv_endpoint:
        rank_env.check_host(rank_env.host_of(options.rdzv_endpoint), "the rendezvous host")
    rank_env.check_host(options.master_addr, "--master-addr")
    return hosts


def _check_metrics(options: LaunchOptions, port: int) -> None:
    from headway.runtime.run_folder.prometheus import check_port  # loads prometheus-client: only when asked for

    if options.no_launch:
        raise InputError("--metrics-port stands for the ranks that headway launches. Drop it, or drop --no-launch.")
    check_port(port, options.metrics_host)
