"""Start a script on the ranks of this host, record it, supervise it, and say how it ended.

Use it as `headway run` does: `launch(LaunchOptions(nproc_per_node=4),
["train.py", "--lr", "1e-3"])`. One host needs no torch here: the ranks are
forked before anything heavy is imported. Several hosts meet through torch's
elastic rendezvous (`headway.runtime.launching.elastic`). Seconds are wall seconds.

`headway run --no-launch`: record one rank of a launch line that exists already.

Use it under torchrun, accelerate, deepspeed, mpiexec or srun: each of their processes is a
`headway run --no-launch -- train.py`, which runs the script as its child in
the environment it was given, drains that child's rings and writes that rank's
events. The host's local rank 0 also writes run.json; file names carry the
rank, so one folder serves all ranks, or all hosts.

>>> place_of({"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}).rank
3
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from headway.core.errors import InputError
from headway.core.files.safe_files import read_json
from headway.runtime.host import rank_env
from headway.runtime.host.rank_env import SOURCES, Command, Port, RankEnvironment, number
from headway.runtime.launching.agent import RankSpec, Signals
from headway.runtime.launching.options import CodeUpdates, LaunchOptions, check
from headway.runtime.launching.run_of_ranks import (
    ExitReport,
    RankSupervisor,
    open_recording,
    open_streams,
    recorded_env,
    report,
    say,
    specs_of,
)
from headway.runtime.run_folder.exit_class import OomWatch, RankEnd
from headway.runtime.run_folder.problems import Problems
from headway.runtime.run_folder.recording import RUNS, Exit, RunRecording, write_json

PEERS_S = 10.0
"""How long local rank 0 waits for the other ranks of its host to have written theirs."""


def place_of(env: Mapping[str, str]) -> RankEnvironment:
    """Return where this process stands in its launch line; without one it is the only rank.

    Raises `InputError` when the variables contradict each other.
    """
    found = {fact: number(env, fact) for fact in SOURCES}
    world_size = found["world_size"] or 1
    rank = found["rank"] or 0
    if not 0 <= rank < world_size:
        raise InputError(
            f"the environment says rank {rank} of {world_size}; a rank must be below the world size. "
            "Set RANK and WORLD_SIZE, or start through torchrun or srun."
        )
    local_world = found["local_world_size"] or (world_size if found["group_rank"] is None else 1)
    local_rank = found["local_rank"]
    return RankEnvironment(
        rank,
        rank % local_world if local_rank is None else local_rank,
        world_size,
        local_world,
        group_rank=rank // local_world if found["group_rank"] is None else found["group_rank"],
        attempt=found["attempt"] or 0,
        max_restarts=found["max_restarts"] or 0,
    )


def launch_line_id(env: Mapping[str, str]) -> str:
    """Return a name that all ranks of this host's launch line share: the job's, else its parent process's."""
    if env.get("SLURM_JOB_ID"):
        return f"{env['SLURM_JOB_ID']}.{env.get('SLURM_STEP_ID', '0')}"
    torch_id = env.get("TORCHELASTIC_RUN_ID", "none")
    if torch_id != "none":
        return torch_id[:12]
    return f"p{os.getppid()}"


def run_attached(options: LaunchOptions, script: Sequence[str], start_ns: int) -> ExitReport:
    """Run the script as the rank that the environment names, recorded, and return how it ended."""
    place = place_of(os.environ)
    out = options.out or RUNS / f"{Path(script[0]).stem}-{launch_line_id(os.environ)}"
    recording = open_recording(
        replace(options, out=out),
        script,
        start_ns,
        nproc=place.local_world_size,
        world_size=place.world_size,
        group_rank=place.group_rank,
        joins=True,
        leads=place.local_rank == 0,
        attempt=place.attempt,
        shared=True,
    )
    streams = open_streams(options, recording)
    watch = OomWatch()
    with Signals() as signals, RankSupervisor(options, recording, streams, signals) as attempts:
        group = attempts.start([_spec(options, script, place, recording)], place.attempt, plain=True)
        group.saves_first = False  # its launcher sends SIGTERM after the failure of a peer, too
        group.wait(signals, grace_s=options.grace_s)
        ends = attempts.finish(group, watch)
    if place.local_rank == 0:
        peers: Sequence[Exit] = ()
        with recording.problems.kept("how other ranks ended"):
            _wait_for_peers(recording.path, place)
            peers = _peer_ends(recording.path, place)
        return report(options, recording, ends, signals, peers=peers)
    ended = report(options, recording, ends, signals)
    exit_ = Exit(ended.code, ended.cls, ended.first_rank, ended.traceback).json()
    late = Problems()
    with late.kept("how this rank ended"):
        (recording.path / "ranks").mkdir(exist_ok=True)
        row = asdict(recording.rows[-1]) | {"group_rank": place.group_rank, "exit": exit_}
        write_json(recording.path / "ranks" / f"r{place.rank}.json", row)
    for problem in late.lines():
        say(options, problem)
    return ended


def _peer_ends(run: Path, place: RankEnvironment) -> list[Exit]:
    """Return how the other ranks of this host and attempt say they ended."""
    rows = (read_json(file) for file in sorted((run / "ranks").glob("r*.json")))
    return [
        Exit(row["exit"]["code"], row["exit"]["class"], row["exit"]["first_rank"], row["exit"]["traceback"])
        for row in rows
        if row["group_rank"] == place.group_rank and row["attempt"] == place.attempt
    ]


def _spec(options: LaunchOptions, script: Sequence[str], place: RankEnvironment, recording: RunRecording) -> RankSpec:
    """Return what the child runs: the same environment, with the recording switched on."""
    argv = rank_env.argv(script[0], script[1:], Command(options.module, options.no_python))
    base = rank_env.inherited(os.environ)
    recorded = recorded_env(base, options, recording, place.attempt)
    # What tells the rank here need not tell it there: the local rank may have been counted.
    recorded |= {"HEADWAY_RANK": str(place.rank), "HEADWAY_LOCAL_RANK": str(place.local_rank)}
    return RankSpec(place.rank, place.local_rank, argv, base | recorded)


def _wait_for_peers(run: Path, place: RankEnvironment) -> None:
    """Wait until the other ranks of this host have written their events, or for `PEERS_S`."""
    first = place.rank - place.local_rank
    others = [rank for rank in range(first, first + place.local_world_size) if rank != place.rank]
    deadline = time.monotonic() + PEERS_S
    while time.monotonic() < deadline and not all(_wrote(run / "ranks" / f"r{rank}.json", place) for rank in others):
        time.sleep(0.05)


def _wrote(file: Path, place: RankEnvironment) -> bool:
    """Say whether a rank has written its end of this attempt."""
    return file.exists() and read_json(file)["attempt"] == place.attempt


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
        return run_attached(options, script, start_ns)
    if max_hosts > 1 or options.standby:
        from headway.runtime.launching.elastic import run_elastic

        return run_elastic(options, script, start_ns, (min_hosts, max_hosts))
    return _run_local(options, script, start_ns)


def _run_local(options: LaunchOptions, script: Sequence[str], start_ns: int) -> ExitReport:
    nproc = rank_env.num_processes(options.nproc_per_node)
    recording = open_recording(options, script, start_ns, nproc=nproc)
    streams = open_streams(options, recording)
    watch = OomWatch()
    ends: list[RankEnd] = []
    code = CodeUpdates(options.update_from, recording.path, script, say=lambda text: say(options, text))
    with Signals() as signals, RankSupervisor(options, recording, streams, signals) as attempts:
        for attempt in range(options.max_restarts + 1):
            with _port(options, attempt) as port:
                places = [
                    RankEnvironment(
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
