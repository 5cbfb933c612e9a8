"""Start a script on the ranks of this host, record it, supervise it, and say how it ended.

Use it as `headway run` does: `launch(LaunchOptions(nproc_per_node=4),
["train.py", "--lr", "1e-3"])`. One host needs no torch here: the ranks are
forked before anything heavy is imported. Several hosts meet through torch's
elastic rendezvous (`headway.runtime.launching.elastic`). Seconds are wall seconds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from headway.runtime.host import rank_env
from headway.runtime.host.rank_env import Port, RankEnvironment
from headway.runtime.launching.agent import Signals
from headway.runtime.launching.attempts import RankSupervisor, say
from headway.runtime.launching.options import CodeUpdates, LaunchOptions, check
from headway.runtime.launching.run_of_ranks import ExitReport, open_recording, open_streams, report, specs_of
from headway.runtime.run_folder.exit_class import OomWatch, RankEnd


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
