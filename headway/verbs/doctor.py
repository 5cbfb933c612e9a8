"""`headway doctor`: look at this host before a run."""

from __future__ import annotations

from dataclasses import asdict

from headway.report.terminal import render_doctor
from headway.runtime.host.doctor import check
from headway.runtime.in_rank import device_checks
from headway.verbs.shared.output import emit


def doctor(*, device: bool = False, json: bool = False) -> int:
    """Check shared memory, file descriptors, RAM, threads, disk and versions: value, limit, fix of each.

    Exits with 3 when something would break or slow a run down.

    Example: `headway doctor --json`

    Args:
      device:
        Try this host's device too, in processes of their own (25 s): torch sees it, a recorded process starts in
        silence, events, threads, the profiler, MPS and MIG; its rates are measured and kept. What cannot be asked here
        says why.
      json: Print one JSON object instead of a table.
    """
    findings = [*check(), *(device_checks.check() if device else [])]
    is_ok = all(row.ok is not False for row in findings)
    answer = {"schema": "headway.doctor/1", "findings": [asdict(row) for row in findings], "ok": is_ok}
    emit(answer, lambda screen: render_doctor(findings, **screen), as_json=json)
    return 0 if is_ok else 3
