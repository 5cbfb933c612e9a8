"""Run small scripts with and without headway's recording, and read what was recorded."""

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headway.runtime.in_rank import bootstrap
from headway.trace.events.vocabulary import SPAN_OF_CODE
from tests.paths import ROOT, python_path
from tests.rings_made import read_ring

INJECT = ROOT / "headway" / "runtime" / "inject"


def environment(folder: Path | None, **extra: str) -> dict[str, str]:
    """Return the environment of a rank; recorded into `folder` unless that is None."""
    base = {name: value for name, value in os.environ.items() if not name.startswith(("HEADWAY", "RANK", "WORLD"))}
    base["OMP_NUM_THREADS"] = "1"
    if folder is not None:
        base.update({"HEADWAY_RUN": str(folder), "PYTHONPATH": python_path(INJECT, ROOT)})
    return {**base, **extra}


GLOO_EXIT_RACE = "terminate called without an active exception"
"""What a gloo rank of torch 2.13 says when it aborts at its exit: with or without headway, now and then."""


FSDP2 = """
        import os, torch, torch.distributed as dist
        from torch.distributed.fsdp import fully_shard
        dist.init_process_group("gloo", init_method=os.environ["STORE"])
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(3)])
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(4):
            x = torch.randn(4, 32, generator=torch.Generator().manual_seed(step * 10 + dist.get_rank()))
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(loss.item().hex())
        dist.destroy_process_group()
    """
"""A script of four FSDP2 steps over three layers on any number of gloo ranks; it prints its losses bit for bit."""


def run_script(source: str, tmp_path: Path, *, ranks: int = 1, recorded: bool = True, **env: str) -> list[str]:
    """Run `source` on `ranks` processes; returns each one's stdout. A failure shows what the script said.

    Several ranks are started again, at most twice, when one of them aborts in torch's own exit race.
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(source))
    folder = tmp_path / "run" if recorded else None
    for attempt in range(3):
        ended = run_ranks(tmp_path, folder, tmp_path / f"store-{recorded}-{attempt}", ranks, env)
        raced = ranks > 1 and any(code == -6 and GLOO_EXIT_RACE in error for code, _, error in ended)
        if not raced:
            break
        if folder is not None:
            shutil.rmtree(folder)
    for code, _, error in ended:
        assert code == 0, error[-3000:]
    (tmp_path / "stderr").write_text("".join(error for _, _, error in ended))
    return [output for _, output, _ in ended]


def run_ranks(
    tmp_path: Path, folder: Path | None, store: Path, ranks: int, env: dict[str, str]
) -> list[tuple[int, str, str]]:
    """Run tmp_path/script.py on `ranks` processes; returns exit code, stdout and stderr of each."""
    processes = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "script.py")],
            env=environment(
                folder, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks),
                STORE=f"file://{store}?rank={rank}&world_size={ranks}", **env,
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=110) for process in processes]
    return [(p.returncode, output, error) for p, (output, error) in zip(processes, outputs, strict=True)]


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


def with_and_without(run: Callable[[], Any], folder: Path) -> tuple[Any, Any]:
    """Return what `run` gives in this process without and with its recording."""
    plain = run()
    with recording(folder):
        return plain, run()
