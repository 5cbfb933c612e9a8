"""Start a script on the ranks of this host, record it, supervise it, and say how it ended.

Use it as `headway run` does: `launch(LaunchOptions(nproc_per_node=4),
["train.py", "--lr", "1e-3"])`. One host needs no torch here: the ranks are
forked before anything heavy is imported. Several hosts meet through torch's
elastic rendezvous (`headway.runtime.launching.elastic`). Seconds are wall seconds.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from headway.core.errors import InputError
from headway.core.files.private import PRIVATE
from headway.core.processes.beside import say_beside
from headway.core.tables import pick
from headway.runtime.host import rank_env
from headway.runtime.host.rank_env import Command, Place, Port
from headway.runtime.launching.agent import RankSpec, Signals
from headway.runtime.launching.attempts import Attempts, say
from headway.runtime.launching.code_updates import CodeUpdates, check_source
from headway.runtime.run_folder.exit_class import (
    BLAME,
    FLUSH_CODE,
    HUNG_CODE,
    OomWatch,
    RankEnd,
    classify,
    exit_status,
    failure_text,
    first_failure,
    traceback_of,
)
from headway.runtime.run_folder.recording import DEFAULT_MAX_RUN_BYTES, Exit, Recording, claim_folder, next_folder
from headway.runtime.run_folder.streams import Streams

if TYPE_CHECKING:
    pass

RUNS = Path("headway-runs")
"""Default parent of run folders, in the working directory."""


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
    """Remedy name -> 'module:function', from the catalog."""
    no_launch: bool = False
    """Join a launch line that exists already (torchrun, srun, accelerate): run the script as this rank."""
    windows: float = 0.01
    """Fraction of run time that deep windows may cost."""
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


@dataclass(frozen=True, slots=True)
class ExitReport:
    """How a launched run ended."""

    code: int
    """Exit status of the first failing rank (128 + signal), 0 when all went well."""
    cls: str
    """ok, user, oom, hang, infra or preempted."""
    first_rank: int | None
    """Global rank that failed first, None when none did."""
    traceback: str | None
    """Its traceback, None without one."""
    seconds: float
    """Launcher start to end, finalisation included."""
    run: Path | None
    """The run folder; None when a signal came before the hosts of a run had met."""
    problems: tuple[str, ...] = ()
    """What the recording lacks, and why."""


def launch(options: LaunchOptions, script: Sequence[str]) -> ExitReport:
    """Run `script` (path or module, then its arguments, untouched) and return how it ended.

    Raises `InputError` for options that cannot work: before any rank starts.
    """
    start_ns = time.perf_counter_ns()
    if not (options.module or options.no_python):
        module, script = rank_env.without_interpreter(script)
        options = replace(options, module=module)
    min_hosts, max_hosts = check(options, script)
    if options.no_launch:
        from headway.runtime.launching.attached import run_attached

        return run_attached(options, script, start_ns)
    if max_hosts > 1 or options.standby:
        from headway.runtime.launching.elastic import run_elastic

        return run_elastic(options, script, start_ns, (min_hosts, max_hosts))
    return _run_local(options, script, start_ns)


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
    if not 0 <= options.windows <= 1:
        raise InputError(f"--windows is {options.windows}; it is a fraction of run time from 0 to 1. Pass 0.01.")
    if options.window_at is not None and options.window_at < 2:
        raise InputError(f"--window-at is {options.window_at}; it is a step, 2 or later. Pass 50.")
    if options.window_at is not None and not options.windows:
        raise InputError("--window-at asks for a deep window, and --windows 0 rules it out. Leave out one of them.")
    if not options.module and not options.no_python and not Path(script[0]).exists():
        module = " ".join(["--module --", *script[1:2]])
        fix = (
            f"For a module write: headway run {module}"
            if script[0] in ("-m", "--module")
            else "Name a script: headway starts Python itself."
        )
        raise InputError(f"the script {script[0]!r} does not exist in {Path.cwd()}. {fix}")
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


def open_recording(
    options: LaunchOptions,
    script: Sequence[str],
    start_ns: int,
    *,
    nproc: int,
    world_size: int | None = None,
    group_rank: int = 0,
    joins: bool = False,
    leads: bool = True,
    attempt: int = 0,
    shared: bool = False,
) -> Recording:
    """Make the run folder and its first run.json; where none was named and `RUNS` cannot be had, in a temporary one.

    Raises `InputError` where a folder that was named cannot be written: no rank has been started.
    """

    def opened(path: Path) -> Recording:
        recording = Recording(
            path.resolve(),
            list(script),
            start_ns,
            nproc=nproc,
            world_size=world_size or nproc,
            group_rank=group_rank,
            joins=joins,
            leads=leads,
            attempt=attempt,
            shared=shared,
            plan=options.apply,
            baseline=options.baseline,
            max_run_bytes=options.max_run_bytes,
        )
        recording.open()
        return recording

    mode, out = options.mode, options.out
    try:
        return opened(claim_folder(out, shared=shared, mode=mode) if out else next_folder(RUNS, script[0], mode))
    except OSError as cause:
        reason = cause.strerror or cause
        if out:
            raise InputError(f"--out {out} cannot be written: {reason}. Name a folder with room.") from cause
        instead = Path(tempfile.mkdtemp(prefix="headway-run-"))
        say(options, f"{RUNS.resolve()} cannot be written ({reason}): this run is recorded in {instead}")
        return opened(instead)


def open_streams(options: LaunchOptions, recording: Recording) -> Streams:
    """Return the reader of the ranks' output; logs share a sixteenth of the run folder's bytes."""
    limit = max(recording.max_run_bytes // 16 // (2 * recording.nproc), 1 << 16)
    logs = options.log_dir or recording.path / "logs"
    problems, to_stderr = recording.problems, options.json
    return Streams(logs, problems, limit_bytes=limit, stdout_to_stderr=to_stderr, mode=options.mode)


def specs_of(
    options: LaunchOptions, script: Sequence[str], places: Sequence[Place], recording: Recording
) -> list[RankSpec]:
    """Return what each rank runs."""
    command = rank_env.argv(script[0], script[1:], Command(options.module, options.no_python))
    base = rank_env.inherited(os.environ)
    specs = []
    for place in places:
        env = base | (rank_env.ALONE if options.is_plain else rank_env.torchrun_env(place, base))
        env |= recorded_env(base, options, recording, place.attempt)
        env["TORCHELASTIC_ERROR_FILE"] = str(recording.path / "logs" / f"r{place.rank}.error.json")
        specs.append(RankSpec(place.rank, place.local_rank, command, env))
    return specs


def recorded_env(base: Mapping[str, str], options: LaunchOptions, recording: Recording, attempt: int) -> dict[str, str]:
    """Return headway's own variables for a rank that is recorded."""
    return rank_env.headway_env(
        base,
        run=recording.path,
        rings=recording.live,
        attempt=attempt,
        plan=recording.path / "plan.json" if options.apply else None,
        remedies=options.remedies,
        windows_fraction=options.windows,
        window_at=options.window_at,
        verify=options.verify,
    )


def _run_local(options: LaunchOptions, script: Sequence[str], start_ns: int) -> ExitReport:
    nproc = rank_env.num_processes(options.nproc_per_node)
    recording = open_recording(options, script, start_ns, nproc=nproc)
    streams = open_streams(options, recording)
    watch = OomWatch()
    ends: list[RankEnd] = []
    code = CodeUpdates(options.update_from, recording.path, script, say=lambda text: say(options, text))
    with Signals() as signals, Attempts(options, recording, streams, signals) as attempts:
        for attempt in range(options.max_restarts + 1):
            with _port(options, attempt) as port:
                places = [
                    Place(
                        rank, rank, nproc, nproc, master_addr=options.master_addr, master_port=port.number,
                        role=options.role, attempt=attempt, max_restarts=options.max_restarts, run_id=options.rdzv_id,
                    )
                    for rank in range(nproc)
                ]  # fmt: skip
                group = attempts.start(specs_of(options, code.script, places, recording), attempt)
                group.wait(signals, grace_s=options.grace_s, is_secondary=attempts.is_secondary)
                ends = attempts.finish(group, watch)
            if signals.stop or not group.failed:
                break
            left = options.max_restarts - attempt
            if not attempts.again(group, ends, left, code):
                break
            code.take()
            say(options, f"attempt {attempt} failed; starting attempt {attempt + 1} of {options.max_restarts}")
    return report(options, recording, ends, signals, output_lost=streams.output_lost)


def _port(options: LaunchOptions, attempt: int) -> Port:
    """Reserve the port that was asked for, or a free one; a taken one costs a line, not the run."""
    if options.master_port and attempt == 0:
        try:
            return Port(options.master_port)
        except OSError:
            say(options, f"port {options.master_port} is taken: another one is used")
    return Port()


def report(
    options: LaunchOptions,
    recording: Recording,
    ends: Sequence[RankEnd],
    signals: Signals,
    *,
    peers: Sequence[Exit] = (),
    output_lost: bool = False,
) -> ExitReport:
    """Class the exit, write the last run.json, and show the first failing rank's traceback last.

    `peers` are the ends that other launchers of this run saw: a fault of its own there explains what looked like a
    stop from outside here. With `output_lost` a run that did not fail exits like Python with output it cannot flush.
    """
    first = first_failure(ends)
    cls = classify(first, preempted=signals.preempted)
    if cls == "ok" and signals.stop:
        cls = "user"  # Ctrl-C, and every rank left with 0
    code = (exit_status(first.code) or HUNG_CODE) if first else FLUSH_CODE * output_lost
    own = Exit(code, cls, first.rank if first else None, traceback_of(first.stderr) if first else None)
    shown = min([own, *peers], key=lambda end: BLAME.index(end.cls))
    recording.end(shown)
    problems = tuple(recording.problems.lines())
    for problem in problems:
        say(options, problem)
    if first is not None:
        say_beside(
            failure_text(first, own, recording.path, interrupted=signal.SIGINT in signals.stop, alone=len(ends) == 1)
        )
    seconds = (time.perf_counter_ns() - recording.start_ns) / 1e9
    return ExitReport(code, shown.cls, shown.first_rank, shown.traceback, seconds, recording.path, problems)
