"""The disk of a run folder fills up or breaks, or the folder is removed, at any moment: does the job go on to its end?

Claim: whatever the moment, a job of two ranks under `headway run --out` prints what it prints without headway, ends
with its own exit code, and headway says what the recording lacks once for each cause. Moments are drawn from the whole
life of the job, its start and its end included; a disk that is full before any rank was started is refused with exit
code 2. The disk is a tmpfs of 48 MiB in a mount namespace of its own. Where FUSE mounts can be made, there are two ways
more: from the moment on each call to the file system fails (EIO), or each that changes something (EROFS).

Needs the right to mount in a namespace of its own (`unshare --mount`); for FUSE /dev/fuse and libfuse 2.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._passing_mount import mounted
from benchmarks.peers.env import python_of
from headway.core.errors import InputError

SCRIPT = """
import time, torch
class Dataset(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, index):
        time.sleep(0.0005)
        return torch.full((8,), float(index))
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
for epoch in range(6):
    for batch in torch.utils.data.DataLoader(Dataset(), batch_size=4):
        loss = model(batch).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        print(epoch, loss.item(), "x" * 400, flush=True)
"""
RANKS = 2
SIZE_MB = 48
HANG_S = 300.0
WAYS = ("fill", "remove")
ERRORS = ("EIO", "EROFS")


def command(script, out=None):
    """Return the command of the job: plain, or under headway with its run folder at `out`."""
    if out is None:
        return [sys.executable, script]
    return [
        sys.executable, "-m", "headway.cli", "run", "--out", out, "--nproc-per-node", str(RANKS), "--", script
    ]  # fmt: skip


def can_mount():
    """Whether a tmpfs can be mounted here, in a namespace of its own."""
    with tempfile.TemporaryDirectory() as folder:
        tried = subprocess.run(
            ["unshare", "--mount", "mount", "-t", "tmpfs", "t", folder], capture_output=True, check=False
        )
    return tried.returncode == 0


def can_break():
    """Whether a FUSE mount can be made here, in a namespace of its own."""
    try:
        return apart("EIO", 0.0, Path(os.devnull))[0] is not None
    except (subprocess.CalledProcessError, InputError):
        return False


def fill(folder):
    """Take all the room that the file system of `folder` has left."""
    with (folder / "filler").open("wb", buffering=0) as file:
        for piece in (1 << 20, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(piece))


def moment(way, after_s, disk, script):
    """Run the job and spoil its disk after so long; returns (exit code or 'hang', stdout, stderr, seconds).

    It mounts a file system in `disk`: call it in a mount namespace of its own.
    """
    if way in ERRORS:
        root = disk / "root"
        with mounted(python_of("fusepy"), root, disk / "mount") as there:
            if not there:
                raise RuntimeError("no FUSE mount can be made here")
            return _spoilt(lambda: root.with_suffix(".errno").write_text(way), after_s, disk / "mount", script)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE_MB}m", "t", disk], check=True)
    if way == "fill":
        return _spoilt(lambda: fill(disk), after_s, disk, script)
    return _spoilt(lambda: shutil.rmtree(disk / "run", ignore_errors=True), after_s, disk, script)


def _spoilt(spoil, after_s, disk, script):
    start = time.monotonic()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        job = subprocess.Popen(command(script, disk / "run"), stdout=out, stderr=err)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(after_s)
        spoil()
        try:
            code = job.wait(HANG_S)
        except subprocess.TimeoutExpired:
            job.kill()
            code = "hang"
        taken = time.monotonic() - start
        out.seek(0)
        err.seek(0)
        return code, out.read().decode(), err.read().decode(errors="replace"), taken


def apart(way, after_s, script):
    """Return what `moment` returns, from a mount namespace of its own."""
    with tempfile.TemporaryDirectory(prefix="headway-full-") as disk:
        asked = ["unshare", "--mount", sys.executable, __file__, "--moment", way, str(after_s), disk, str(script)]
        return json.loads(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)


def faults_of(way, after_s, script, plain):
    """Return what was wrong with the job whose disk was spoilt then, [] for nothing, and how long it took."""
    code, out, err, taken = apart(way, after_s, script)
    if code == 2 and not out:  # it had not begun
        return ([] if err.count("\n") == 1 else [f"at the start: {err}"]), taken
    faults = [] if code == 0 else [f"exit code {code}"]
    if sorted(out.splitlines()) != sorted(plain.splitlines() * RANKS):
        faults.append(f"printed {len(out.splitlines())} lines of {len(plain.splitlines()) * RANKS}")
    if "Traceback" in err:
        faults.append(err[err.index("Traceback") :])
    causes = [line.rpartition(":")[2] for line in err.splitlines() if line.startswith("headway: the recording lacks")]
    if len(causes) > len(set(causes)):
        faults.append(f"said twice: {causes}")
    return faults, taken


def main():
    """Spoil the disk at seeded moments; print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=10)
    parser.add_argument("--full", action="store_true", help="30 moments")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--moment", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.moment:
        way, after_s, disk, script = options.moment
        print(json.dumps(moment(way, float(after_s), Path(disk), script)))
        return 0
    if not can_mount():
        print(json.dumps({"bench": "full_disk", "met": False, "reason": "no file system can be mounted here"}))
        return 1
    ways = WAYS + ERRORS if can_break() else WAYS
    draw, bad, count = random.Random(options.seed), [], 30 if options.full else options.moments
    with tempfile.TemporaryDirectory() as name:
        script = Path(name) / "train.py"
        script.write_text(SCRIPT)
        plain = subprocess.run(command(script), capture_output=True, text=True, check=False).stdout
        life_s = apart("remove", 2 * HANG_S, script)[3]
        for way in ways:
            for _ in range(count):
                after_s = draw.uniform(0, life_s)
                faults, _ = faults_of(way, after_s, script, plain)
                bad += [{"way": way, "after_s": round(after_s, 2), "fault": fault[-2000:]} for fault in faults]
    print(json.dumps({
        "bench": "full_disk", "ranks": RANKS, "moments": dict.fromkeys(ways, count), "bad": len(bad),
        "faults": bad[:5], "met": not bad,
    }))  # fmt: skip
    return 3 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
