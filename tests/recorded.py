"""Run small scripts with and without headway's recording, and read what was recorded."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headway.runtime import bootstrap
from headway.trace.records import read_ring
from headway.trace.vocabulary import SPAN_OF_CODE
from tests.paths import ROOT

INJECT = ROOT / "headway" / "runtime" / "inject"


def environment(folder: Path | None, **extra: str) -> dict[str, str]:
    """Return the environment of a rank; recorded into `folder` unless that is None."""
    base = {name: value for name, value in os.environ.items() if not name.startswith(("HEADWAY", "RANK", "WORLD"))}
    base["OMP_NUM_THREADS"] = "1"
    if folder is not None:
        base.update({"HEADWAY_RUN": str(folder), "PYTHONPATH": os.pathsep.join([str(INJECT), str(ROOT)])})
    return {**base, **extra}


def run_script(source: str, tmp_path: Path, *, ranks: int = 1, recorded: bool = True, **env: str) -> list[str]:
    """Run `source` on `ranks` processes; returns each one's stdout. A failure shows what the script said."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(source))
    folder = tmp_path / "run" if recorded else None
    store = tmp_path / f"store-{recorded}"
    processes = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env=environment(
                folder,
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(ranks),
                STORE=f"file://{store}?rank={rank}&world_size={ranks}",
                **env,
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
        )
        for rank in range(ranks)
    ]
    outputs = [process.communicate(timeout=110) for process in processes]
    for process, (_, error) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, error[-3000:]
    (tmp_path / "stderr").write_text("".join(error for _, error in outputs))
    return [output for output, _ in outputs]


def rows(folder: Path, *, role: str | None = None, rank: int | None = None) -> dict[str, list[dict[str, int]]]:
    """Return name -> records (a dict of numbers each, in order) of the rings in a run folder."""
    found: dict[str, list[dict[str, int]]] = {}
    for path in sorted((folder / "rings").glob("*.ring")):
        header, records, lost = read_ring(path)
        assert lost == 0
        if role not in (None, header.role) or rank not in (None, header.rank):
            continue
        for record in records:
            row = {name: int(record[name]) for name in records.dtype.names}
            row |= {"pid": header.pid, "worker": header.worker, "rank": header.rank}
            found.setdefault(SPAN_OF_CODE[row["code"]], []).append(row)
    return found


@contextmanager
def recording(folder: Path, **env: str) -> Iterator[bootstrap.Session]:
    """Record this very process for the length of a block."""
    session = bootstrap.start_here({"HEADWAY_RUN": str(folder), "HEADWAY_WINDOWS": "0", **env})
    try:
        yield session
    finally:
        if bootstrap.active() is session:
            session.stop()
