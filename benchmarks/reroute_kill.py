"""A rank of two replicas of a two-stage pipeline is killed by SIGKILL at drawn moments: does the job train as without?

Claim: four gloo ranks under `headway run`, `pipeline(..., replicas=2, elastic=True)`, with dropout and Adam. Of a drawn
rank killed at a drawn moment of a drawn step the others take over the work: every loss of every micro-batch is that of
a run without failures to 1e-5, no step is lost, weights agree to 1e-5, nothing is restarted. A second rank, of the
other stage, is killed within 50 ms of the first in every fourth run, while the others switch; where both ranks of a
stage are killed, the job ends within 30 s and says which rank was lost. Four kills by default; `--full`: twelve, and
one kill of the same job under torchft (`jobs/torchft_pipeline.py`), which goes on without the whole replica.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from peers.env import layered

from headway.core.rng import stream

JOB = Path(__file__).resolve().parent / "jobs" / "rerouted.py"
STEPS = 14


def train(folder: Path, kills: list[list[object]], ranks: int = 4) -> tuple[int, str, float]:
    """Run the job; return its exit code, what it said on stderr, and its seconds."""
    plan = json.dumps({"steps": STEPS, "stages": ranks // 2, "kills": kills})
    line = [
        sys.executable, "-m", "headway.cli", "run", "--out", str(folder / "run"), "--nproc-per-node", str(ranks), "--",
        str(JOB), str(folder), plan,
    ]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    begin_s = time.perf_counter()
    done = subprocess.run(line, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=150)
    return done.returncode, done.stderr, time.perf_counter() - begin_s


def losses(folder: Path) -> dict[int, list[list[float]]]:
    """Return step -> the losses that each rank of the last stage has logged."""
    rows: dict[int, list[list[float]]] = {}
    for file in folder.glob("log-*"):
        for line in file.read_text().splitlines():
            step, _, values = json.loads(line)
            rows.setdefault(step, []).append(values)
    return rows


def switch_s(folder: Path) -> float:
    """Return how much longer the longest step took than the median, of the rank that noticed it most."""
    longest = 0.0
    for file in folder.glob("log-*"):
        seconds = sorted(json.loads(line)[1] for line in file.read_text().splitlines()[1:])
        longest = max(longest, seconds[-1] - seconds[len(seconds) // 2] if seconds else 0.0)
    return longest


def compared(folder: Path, calm: Path) -> tuple[float, float, int]:
    """Return the largest difference of a loss and of a weight, and how many steps lack."""
    ours, theirs = losses(folder), losses(calm)
    off = max(abs(a - b) for step in ours for row in ours[step] for a, b in zip(row, theirs[step][0], strict=True))
    weights = 0.0
    for file in folder.glob("weights-*.pt"):
        state, other = torch.load(file), torch.load(calm / file.name)
        names = [name for name in state if "running" not in name and "tracked" not in name]
        weights = max([weights, *((state[name] - other[name]).abs().max().item() for name in names)])
    return off, weights, STEPS - len(ours)


LIGHTHOUSE = """
import sys
from torchft.coordination import LighthouseServer
server = LighthouseServer(bind="[::]:0", min_replicas=1)
print(server.address(), flush=True)
sys.stdin.read()
"""


def free_port() -> int:
    """Return a port of loopback that nobody has."""
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        return int(chosen.getsockname()[1])


def under_torchft(folder: Path, steps: int, kill: list[int]) -> dict[str, object]:
    """Kill a rank of the job under torchft; return what its other replica did, and the ranks that went on."""
    python, job = layered("torchft"), JOB.with_name("torchft_pipeline.py")
    ports = [free_port(), free_port()]
    server = subprocess.Popen([python, "-c", LIGHTHOUSE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    plan = json.dumps({"steps": steps, "kill": kill})
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2",
           "PYTHONPATH": str(JOB.parents[2]), "TORCHFT_LIGHTHOUSE": server.stdout.readline().strip()}  # fmt: skip
    ranks = [
        subprocess.Popen(
            [python, str(job), str(folder), plan], stderr=subprocess.DEVNULL,
            env=env | {"REPLICA_GROUP_ID": str(replica), "RANK": str(rank), "MASTER_PORT": str(ports[replica])},
        )
        for replica in range(2)
        for rank in range(2)
    ]  # fmt: skip
    try:
        codes = [rank.wait(timeout=150) for rank in ranks]
    finally:
        for process in (*ranks, server):
            process.kill()
            process.wait()
    rows = [json.loads(line) for line in (folder / f"torchft-{1 - kill[0]}").read_text().splitlines()]
    seconds = sorted(row[1] for row in rows[1:])
    return {
        "ranks_that_go_on": codes.count(0), "steps": sum(row[2] > 0 for row in rows),
        "steps_of_half_a_batch": sum(row[2] == 1 for row in rows[1:]),
        "steps_not_committed": sum(not row[2] for row in rows),
        "switch_s": round(seconds[-1] - seconds[len(seconds) // 2], 3),
    }  # fmt: skip


def main() -> int:
    """Train undisturbed and disturbed, compare, and print one JSON line."""
    draws, rows = stream(int(os.environ.get("SEED", "0")), "reroute_kill"), []
    with tempfile.TemporaryDirectory() as top:
        calm = Path(top, "calm")
        calm.mkdir()
        code, text, _ = train(calm, [])
        if code:
            raise RuntimeError(f"the job without kills ended with {code}:\n{text[-3000:]}")
        for number in range(12 if "--full" in sys.argv else 4):
            rank = int(draws.integers(4))
            kills: list[list[object]] = [[rank, int(draws.integers(STEPS - 1)), float(draws.uniform(0, 60))]]
            if number % 4 == 3:
                other = int(draws.choice([one for one in range(4) if one % 2 != rank % 2]))
                kills.append([other, "switch", float(draws.uniform(0, 50))])
            folder = Path(top, str(number))
            folder.mkdir()
            code, text, _ = train(folder, kills)
            if code:
                raise RuntimeError(f"kills {kills}: the job ended with {code}:\n{text[-3000:]}")
            off, weights, lacking = compared(folder, calm)
            rows.append({"kills": kills, "loss": off, "weights": weights, "lacking": lacking, "s": switch_s(folder)})
        last = Path(top, "last")
        last.mkdir()
        code, text, ended_s = train(last, [[1, 4, 5.0], [3, "switch", float(draws.uniform(0, 50))]])
        peer = under_torchft(Path(top), STEPS, [1, 0, 6, 5]) if "--full" in sys.argv else None
    switches = sorted(row["s"] for row in rows)
    clear = "rank 3 was killed by signal 9; no other rank has its stage" in text
    result = {
        "bench": "reroute_kill", "kills": sum(len(row["kills"]) for row in rows), "runs": len(rows),
        "largest_loss_difference": max(row["loss"] for row in rows),
        "largest_weight_difference": max(row["weights"] for row in rows),
        "steps_lost": sum(row["lacking"] for row in rows), "restarts": 0,
        "switch_s": {"median": round(switches[len(switches) // 2], 3), "longest": round(switches[-1], 3)},
        "torchft": peer,
        "last_peer": {"code": code, "says_why": clear, "s": round(ended_s, 1)},
        "claim": "both differences <= 1e-5, steps_lost == 0, a clear end without a peer",
    }  # fmt: skip
    print(json.dumps(result))
    good = result["largest_loss_difference"] <= 1e-5 and result["largest_weight_difference"] <= 1e-5
    return 0 if good and not result["steps_lost"] and code and clear else 3


if __name__ == "__main__":
    sys.exit(main())
