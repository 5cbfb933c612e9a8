"""Six ways in which torch's distributed checkpoint loses a state or a job: each shown on it, and not on headway's.

D1 what is fsynced before it is flushed; D2 a crash at every rename, removal and fsync of a save over an older one;
D3 a flipped bit and a cut file; D4 an asynchronous save under a storm of all-reduces, with the default process group;
D5 a plan from the cache after the type of a tensor has changed; D6 a background process and a script without a main
guard. Claim: the stock run fails at each, ours at none. Ours: the same calls with headway's writer, planner and reader
(D1-D3, D5), `headway.checkpoint.async_save` (D4), and `headway.Checkpointer` (D6).
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import headway.checkpoint as ours
from headway.storage import verify
from headway.storage.formats.dcp import read_metadata

PATIENCE_S = {"stock": 15.0, "ours": 60.0}
"""Side -> by when a job of a second hangs. Ours gets more, for a busy host: it must end, and is not timed."""

Shown = tuple[bool, str]
"""Whether it went well, and what was seen."""

Save = Callable[..., Any]


def state(value: float, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Return tensors of one value."""
    return {f"w{index}": torch.full((64, 64), value, dtype=dtype) for index in range(3)}


def stock_save(tensors: dict[str, Any], place: Path) -> None:
    """Save as the documentation shows."""
    dcp.save(tensors, checkpoint_id=place)


def our_save(tensors: dict[str, Any], place: Path) -> None:
    """Save with our parts in the same call."""
    dcp.save(tensors, storage_writer=ours.HeadwayWriter(place), planner=ours.HeadwayPlanner())


def loaded(place: Path, reader: Any = None) -> dict[str, torch.Tensor] | str:
    """Return what a load gives, or the error."""
    found = state(-1.0)
    try:
        dcp.load(found, storage_reader=reader or dcp.FileSystemReader(place))
    except CheckpointException as cause:
        error = next(iter(cause.failures.values()))[0]
        return f"{type(error).__name__}: {error}"
    except Exception as error:  # whatever it raises is what a user sees
        return f"{type(error).__name__}: {error}"
    return found


def is_state(found: dict[str, torch.Tensor] | str, value: float) -> bool:
    """Say whether a load gave the tensors of `value`."""
    return isinstance(found, dict) and all(torch.equal(found[name], each) for name, each in state(value).items())


# D1: a probe around os.fsync.


def early_fsyncs(save: Save, folder: Path) -> Shown:
    """Note the length of every file when it is fsynced, and when the save is over."""
    seen: list[tuple[int, int, str]] = []
    real = os.fsync

    def probe(file: int) -> None:
        name = os.readlink(f"/proc/self/fd/{file}")
        if not os.path.isdir(name):
            seen.append((os.stat(name).st_ino, os.fstat(file).st_size, name))
        real(file)

    os.fsync = probe
    try:
        save(state(1.0), folder / "step-1")
    finally:
        os.fsync = real
    sizes = {path.stat().st_ino: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    early = [(Path(name).name, size, sizes[inode]) for inode, size, name in seen if size != sizes.get(inode, size)]
    told = ", ".join(f"{name} fsynced at {size} of {whole} bytes" for name, size, whole in early)
    return not early, told or f"all of {len(seen)} files whole when fsynced"


# D2: a process that ends at the k-th change of the folder.


def crash_points(save: Save, folder: Path) -> Shown:
    """Save over an older checkpoint, and crash before every rename, removal and fsync in turn."""
    bad, points = [], 0
    while True:
        place = folder / f"at-{points}" / "step-1"
        save(state(1.0), place)
        if not crashes(lambda place=place: save(state(2.0), place), points):
            return not bad, f"{len(bad)} of {points} crashes leave nothing that loads" + (f": {bad[0]}" if bad else "")
        found = loaded(place)
        if not (is_state(found, 1.0) or is_state(found, 2.0)):
            bad.append(found if isinstance(found, str) else "tensors of both")
        points += 1


def crashes(act: Callable[[], None], after: int) -> bool:
    """Run `act` in a fork that ends at its event number `after`; say whether it came to that."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    left = [after]

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if not left[0]:
                os._exit(9)
            left[0] -= 1
            return real(*arguments, **options)

        return call

    for name in ("rename", "replace", "unlink", "remove", "rmdir", "fsync"):
        setattr(os, name, counted(getattr(os, name)))
    try:
        act()
    finally:
        os._exit(0)


# D3: what a damaged file loads as.


def damage(save: Save, reader: Callable[[Path], Any], folder: Path) -> Shown:
    """Flip a bit of a tensor; cut the file short; load each."""
    place = folder / "step-1"
    save(state(1.0), place)
    file = next(place.rglob("*.distcp"))
    whole = file.read_bytes()
    flipped = bytearray(whole)
    flipped[whole.index(torch.ones(8).numpy().tobytes()) + 2] ^= 1
    seen = []
    for data in (bytes(flipped), whole[: len(whole) // 2]):
        file.write_bytes(data)
        found = loaded(place, reader(place))
        seen.append("loads wrong values" if isinstance(found, dict) else found)
    named = all(file.name in text and ("w0" in text or "w1" in text) for text in seen)
    return named, "; cut short: ".join(text.splitlines()[0][:90] if text else "''" for text in seen)


# D4: two ranks, collectives on both threads.

STORM = """
import json, os, sys, time, warnings
warnings.simplefilter("ignore")
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import headway.checkpoint as ours

dist.init_process_group("gloo", init_method=os.environ["STORE"])
begun = time.monotonic()
save = ours.async_save if sys.argv[1] == "ours" else dcp.async_save
for number in range(3):
    state = {f"w{k}": torch.full((64, 64), float(number)) for k in range(8)}
    future = save(state, checkpoint_id=f"{os.environ['FOLDER']}/step-{number}")
    for _ in range(500):
        dist.all_reduce(torch.ones(8))
    future.result()
found = {f"w{k}": torch.zeros(64, 64) for k in range(8)}
dcp.load(found, checkpoint_id=f"{os.environ['FOLDER']}/step-2", process_group=dist.new_group(backend="gloo"))
assert all((tensor == 2).all() for tensor in found.values())
print("done", flush=True)
os._exit(0)
"""


def storm(side: str, folder: Path) -> Shown:
    """Save behind a storm of all-reduces, on two ranks."""
    (folder / "job.py").write_text(STORM)
    begun_s = time.monotonic()
    ranks = []
    for rank in (0, 1):
        env = {
            **os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank), "WORLD_SIZE": "2", "FOLDER": str(folder),
            "STORE": f"file://{folder}/store?rank={rank}&world_size=2",
        }  # fmt: skip
        ranks.append(started([sys.executable, str(folder / "job.py"), side], env, folder))
    ends = [ended(rank, begun_s + PATIENCE_S[side]) for rank in ranks]
    took_s = time.monotonic() - begun_s
    if None in ends:
        return False, f"hangs: not over after {PATIENCE_S[side]:.0f} s"
    texts = [text for _, text in ends]
    fine = all("done" in text for text in texts)
    return fine, f"over after {took_s:.1f} s" if fine else f"fails: {last_line(''.join(texts))}"


def started(command: list[str], env: dict[str, str], folder: Path) -> subprocess.Popen[str]:
    """Start a process in a session of its own; what it prints is kept."""
    return subprocess.Popen(
        command, env=env, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip


def ended(process: subprocess.Popen[str], until_s: float) -> tuple[int, str] | None:
    """Return exit code and output; None for a process that hangs, which is ended with those it started."""
    try:
        text, _ = process.communicate(timeout=max(until_s - time.monotonic(), 0.1))
        return process.returncode, text
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.communicate()
        return None


def last_line(text: str) -> str:
    """Return the last line that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:120] if lines else "nothing is said"


# D5: a plan that is out of date.


def stale_plan(save: Save, folder: Path) -> Shown:
    """Save float32, then bfloat16 under the same names; look what the metadata calls it."""
    save(state(1.0), folder / "step-1")
    save(state(1.0, torch.bfloat16), folder / "step-2")
    told = {tensor.dtype for tensor in read_metadata((folder / "step-2" / ".metadata").read_bytes()).tensors.values()}
    report = verify(folder / "step-2")
    return told == {"bfloat16"} and report.status == "good", f"bfloat16 tensors are called {', '.join(sorted(told))}"


# D6: a script as people write it.

STOCK_SCRIPT = """
import os, warnings
warnings.simplefilter("ignore")
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

print("main runs", flush=True)
dist.init_process_group("gloo")
future = dcp.async_save({"w": torch.ones(100)}, checkpoint_id="step-1", process_group=dist.new_group(backend="gloo"),
    async_checkpointer_type=AsyncCheckpointerType.PROCESS)
getattr(future, "upload_completion", future).result()
found = {"w": torch.zeros(100)}
dcp.load(found, checkpoint_id="step-1", no_dist=True)
assert found["w"].all()
print("saved", flush=True)
"""

OUR_SCRIPT = """
import torch
import headway

print("main runs", flush=True)
layer = torch.nn.Linear(10, 10)
ckpt = headway.Checkpointer(".", model=layer)
ckpt.save(1, block="durable")
other = torch.nn.Linear(10, 10)
again = headway.Checkpointer(".", model=other)
again.restore()
assert torch.equal(layer.weight, other.weight)
ckpt.close(); again.close()
print("saved", flush=True)
"""


def unguarded(side: str, folder: Path) -> Shown:
    """Run a script that has no main guard."""
    (folder / "train.py").write_text({"stock": STOCK_SCRIPT, "ours": OUR_SCRIPT}[side])
    with free_port() as port:
        env = {
            **os.environ, "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parent.parent),
        }  # fmt: skip
    end = ended(started([sys.executable, "train.py"], env, folder), time.monotonic() + PATIENCE_S[side])
    if end is None:
        return False, f"hangs: not over after {PATIENCE_S[side]:.0f} s"
    runs, fine = end[1].count("main runs"), "saved" in end[1] and not end[0]
    return fine and runs == 1, f"main runs {runs} times, " + ("saved" if fine else f"fails: {last_line(end[1])}")


@contextlib.contextmanager
def free_port() -> Iterator[int]:
    """Yield a port that is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        yield probe.getsockname()[1]


def main() -> int:
    """Show each defect on both sides; print one JSON line."""
    warnings.simplefilter("ignore")
    root = Path(tempfile.mkdtemp())
    torch.set_num_threads(1)

    def cached(tensors: dict[str, Any], place: Path) -> None:
        dcp.save(tensors, checkpoint_id=place, planner=DefaultSavePlanner(enable_plan_caching=True))

    cases: dict[str, tuple[Callable[[Path], Shown], Callable[[Path], Shown]]] = {
        "D1 fsync before flush": (lambda at: early_fsyncs(stock_save, at), lambda at: early_fsyncs(our_save, at)),
        "D2 crash while overwriting": (lambda at: crash_points(stock_save, at), lambda at: crash_points(our_save, at)),
        "D3 damaged file": (
            lambda at: damage(stock_save, dcp.FileSystemReader, at),
            lambda at: damage(our_save, ours.HeadwayReader, at),
        ),
        "D4 shared process group": (lambda at: storm("stock", at), lambda at: storm("ours", at)),
        "D5 cached plan": (lambda at: stale_plan(cached, at), lambda at: stale_plan(our_save, at)),
        "D6 no main guard": (lambda at: unguarded("stock", at), lambda at: unguarded("ours", at)),
    }
    shown: dict[str, Any] = {}
    try:
        for number, (name, sides) in enumerate(cases.items()):
            found = []
            for side, run in zip(("stock", "ours"), sides, strict=True):
                folder = root / f"{number}-{side}"
                folder.mkdir()
                found.append(run(folder))
            (stock_fine, stock), (our_fine, mine) = found
            shown[name] = {"stock_fails": not stock_fine, "stock": stock, "ours_passes": our_fine, "ours": mine}
    finally:
        shutil.rmtree(root, ignore_errors=True)
    met = all(each["stock_fails"] and each["ours_passes"] for each in shown.values())
    print(json.dumps({
        "bench": "stock_defects", "baseline": f"torch.distributed.checkpoint, torch {torch.__version__}",
        "defects": shown, "stock_failed": sum(each["stock_fails"] for each in shown.values()),
        "ours_passed": sum(each["ours_passes"] for each in shown.values()), "claim": "6 of 6 fail, 6 of 6 pass",
        "met": met,
    }))  # fmt: skip
    return 0 if met else 3


if __name__ == "__main__":
    sys.exit(main())
