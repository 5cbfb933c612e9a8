"""`headway run`: record a script and supervise it; the last line is the verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from headway.catalog import REMEDIES
from headway.core.errors import HeadwayError, InputError
from headway.core.planfile import PlanFile, read_plan
from headway.runtime.launch import ExitReport, LaunchOptions, launch
from headway.verbs.output import emit


def run(
    *,
    nproc_per_node: str = "1",
    nnodes: str = "1",
    node_rank: int = 0,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_id: str = "none",
    rdzv_conf: str = "",
    standalone: bool = False,
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    master_addr: str = "127.0.0.1",
    master_port: int | None = None,
    local_addr: str | None = None,
    role: str = "default",
    log_dir: Path | None = None,
    module: Annotated[bool, Parameter(alias="-m")] = False,
    no_python: bool = False,
    out: Path | None = None,
    apply: Path | None = None,
    baseline: Path | None = None,
    no_launch: bool = False,
    windows: float = 0.01,
    grace_s: float = 30.0,
    max_run_bytes: str = "512MB",
    quiet: bool = False,
    json: bool = False,
    script: Annotated[list[str] | None, Parameter(parse=False)] = None,
) -> int:
    """Run a training script unmodified, record it, and say where its device time went.

    Everything behind `--` reaches the script unchanged. Exits with the first failing rank's code (128 + signal).

    Example: `headway run --nproc-per-node 2 -- train.py --lr 1e-3`

    Parameters
    ----------
    nproc_per_node
        Ranks on this host: a number, auto, cpu or gpu.
    nnodes
        Hosts: a number or MIN:MAX.
    node_rank
        Index of this host, for the static rendezvous.
    rdzv_backend, rdzv_endpoint, rdzv_id, rdzv_conf
        As torchrun's.
    standalone
        Accepted for torchrun's sake: one host needs no rendezvous here.
    max_restarts
        Attempts after the first one.
    monitor_interval
        Seconds between looks at the ranks of several hosts.
    master_addr, master_port, local_addr, role
        As torchrun's; the port is a free one by default.
    log_dir
        Where the ranks' output is kept; RUN/logs by default.
    module
        The script is a module, as in python -m.
    no_python
        The script is a program of its own.
    out
        The run folder; headway-runs/SCRIPT-N by default.
    apply
        A plan file, or the run folder whose plan to apply.
    baseline
        The run to compare with; by default the one the plan was made from.
    no_launch
        Join a launch line that exists already (torchrun, srun, accelerate launch): run the script as this rank.
    windows
        Fraction of run time that deep profiler windows may cost; 0 for none.
    grace_s
        Seconds between SIGTERM and SIGKILL.
    max_run_bytes
        Most bytes the run folder may take.
    quiet
        No status line and no verdict; a failure's traceback still comes.
    json
        Print one JSON object (schema headway.run/1) at the end; the script's stdout goes to stderr.
    """
    from headway.core.units import parse_bytes

    if not script:
        raise InputError("no script was given. Put it behind --, as in: headway run -- train.py --lr 1e-3")
    plan_path = plan_file(apply)
    plan = read_plan(plan_path) if plan_path else None
    before = baseline or (Path(plan.baseline) if plan and plan.baseline else None)
    options = LaunchOptions(
        nproc_per_node=int(nproc_per_node) if nproc_per_node.isdigit() else nproc_per_node,
        nnodes=nnodes,
        node_rank=node_rank,
        rdzv_backend=rdzv_backend,
        rdzv_endpoint=rdzv_endpoint,
        rdzv_id=rdzv_id,
        rdzv_conf=rendezvous_settings(rdzv_conf),
        standalone=standalone,
        max_restarts=max_restarts,
        monitor_interval=monitor_interval,
        master_addr=master_addr,
        master_port=master_port,
        local_addr=local_addr,
        role=role,
        log_dir=log_dir,
        module=module,
        no_python=no_python,
        out=out,
        apply=plan_path,
        baseline=str(before) if before else None,
        remedies=REMEDIES if plan else {},
        no_launch=no_launch,
        windows=windows,
        grace_s=grace_s,
        max_run_bytes=parse_bytes(max_run_bytes),
        quiet=quiet,
        json=json,
    )
    report = launch(options, script)
    if not quiet or json:
        tell(report, plan, before, json)
    return report.code


def plan_file(path: Path | None) -> Path | None:
    """Return the plan file that --apply means: the file itself, or the plan of a run folder."""
    if path is None:
        return None
    inside = path / "plan.json"
    if path.is_dir() and not inside.is_file():
        raise InputError(f"{path} holds no plan.json. Write one with: headway plan {path}")
    return inside if path.is_dir() else path


def rendezvous_settings(text: str) -> dict[str, str]:
    """Parse torchrun's --rdzv-conf, 'key=value,key=value'; raises `InputError`.

    >>> rendezvous_settings("timeout=30,read_timeout=5")
    {'timeout': '30', 'read_timeout': '5'}
    """
    pairs = [part.split("=", 1) for part in text.split(",") if part]
    if any(len(pair) != 2 for pair in pairs):
        raise InputError(f"--rdzv-conf is {text!r}. Write key=value pairs with commas between them.")
    return {key.strip(): value.strip() for key, value in pairs}


def tell(report: ExitReport, plan: PlanFile | None, baseline: Path | None, as_json: bool) -> None:
    """Print how the run ended and what it was like; a run too broken to explain still gets its ending."""
    from headway.report.terminal import render_run

    answer: dict[str, Any] = {
        "schema": "headway.run/1",
        "run": str(report.run),
        "exit": {
            "code": report.code,
            "class": report.cls,
            "first_rank": report.first_rank,
            "traceback": report.traceback,
        },
        "goodput": None,
        "steps_per_s": None,
        "baseline": str(baseline) if baseline else None,
        "applied": [],
    }
    try:
        from headway.verbs.verdict import summarise, verdict_line

        facts, explanation = summarise(report.run, plan, baseline)
        answer.update(facts)
        line = verdict_line(explanation)
    except HeadwayError as reason:
        line = f"nothing to account for: {reason}"
    if as_json:
        emit(answer, lambda _: "", as_json=True)
        return
    emit(answer, lambda screen: render_run(answer, **screen), as_json=False)
    print(line)
