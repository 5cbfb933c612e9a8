"""CPU of four prep-bound jobs over the same images: one data server against four DataLoaders, and against TensorSocket.

Claims: four jobs (processes of their own; a training step sleeps) get their images from one server with default options
(order "auto", no cache) for at most 0.35x the CPU seconds of four torch DataLoaders with two workers each, and at most
0.80x of TensorSocket 0.0.5 over one such DataLoader. All decode 500x375 JPEGs with simplejpeg, crop, resize to 224 and
flip, in uint8. CPU of all processes from the order to begin to the end of the epochs, server included. Every job of the
first two gets each image exactly once per epoch in an order of its own (asserted). TensorSocket gives all jobs one
order and drops the end of an epoch; its CPU is divided by the images that its loader prepared, ours by those of an
epoch.
"""

import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from peers.env import python_of

from headway.core.wire.channel import connect
from headway.data.bytes.source import SyntheticJpeg
from headway.data.service.messages import FROM_SERVER, StatusRequest

ROOT = Path(__file__).resolve().parent.parent
JOBS, BATCH, STEP_S = 4, 32, 0.01
COUNT, EPOCHS = 768, 1


class Process:
    """A job that waits for orders."""

    def __init__(self, python: str, *kind: str) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        script = str(ROOT / "benchmarks" / "jobs" / "share_images.py")
        self.process = subprocess.Popen(
            [python, script, *kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env
        )

    def ready(self) -> None:
        """Wait until it can begin."""
        if self.process.stdout.readline() != "ready\n":
            raise SystemExit(f"a job did not start: {self.process.poll()}")

    def begin(self, order: dict) -> None:
        """Give an order."""
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict:
        """Wait until it is done."""
        for line in self.process.stdout:
            if line.startswith("{"):  # TensorSocket logs to stdout
                return json.loads(line)
        raise SystemExit(f"a job ended with {self.process.wait(20)}")

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        """End it: it holds nothing that it must put away."""
        self.process.kill()
        self.process.communicate()


def process_cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process has had, its threads' included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def once(answers: list[dict], count: int) -> None:
    """Check that every job had each item exactly once in each epoch."""
    for answer in answers:
        for taken in answer["taken"]:
            if sorted(taken) != list(range(count)):
                raise SystemExit(f"a job got {len(taken)} items, {len(set(taken))} different, of {count}")


def with_loaders(jobs: list[Process], order: dict) -> tuple[float, dict]:
    """Return the CPU seconds of four DataLoaders."""
    for job in jobs:
        job.begin({**order, "way": "plain"})
    answers = [job.answer() for job in jobs]
    once(answers, order["count"])
    return sum(answer["cpu_s"] for answer in answers), {}


def with_server(jobs: list[Process], order: dict) -> tuple[float, dict]:
    """Return the CPU seconds of four jobs and their server, and what it says of itself."""
    path = Path(order["folder"]) / "server.sock"
    for job in jobs:
        job.begin({**order, "way": "served", "server": {**order["server"], "path": str(path)}})
    answers = [job.answer() for job in jobs]
    once(answers, order["count"])
    channel = connect(path, types=FROM_SERVER)
    channel.send(StatusRequest())
    facts = channel.receive(10.0)[0].facts
    spent = process_cpu_s(facts["pid"])
    os.kill(facts["pid"], signal.SIGTERM)
    while path.exists():
        time.sleep(0.02)
    return sum(answer["cpu_s"] for answer in answers) + spent, facts


def with_tensorsocket(python: str, order: dict) -> tuple[float, dict]:
    """Return the CPU seconds of a TensorSocket producer and four consumers."""
    order = {**order, "ports": free_ports(4), "jobs": JOBS}
    with contextlib.ExitStack() as running:
        processes = [running.enter_context(Process(python, "peer")) for _ in range(JOBS + 1)]
        for process in processes:
            process.ready()
        processes[0].begin({**order, "way": "produce"})
        for process in processes[1:]:
            process.begin({**order, "way": "consume"})
        answers = [process.answer() for process in processes]
    taken = [answer["taken"] for answer in answers[1:]]
    if any(items != taken[0] or len(items[0]) < order["count"] // 2 for items in taken):
        raise SystemExit(f"TensorSocket's consumers got {[[len(epoch) for epoch in items] for items in taken]} items")
    return sum(answer["cpu_s"] for answer in answers), {"received": len(taken[0][0])}


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on."""
    held = [socket.create_server(("", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports


def main() -> int:
    """Run the three ways in interleaved rounds; `--full` takes five."""
    rounds = 5 if "--full" in sys.argv[1:] else 1
    python = str(python_of("tensorsocket"))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        images = [SyntheticJpeg(192, 500, 375, seed=11).read(k) for k in range(192)]
        for k in range(COUNT):
            Path(f"{folder}/{k}.jpg").write_bytes(images[k % len(images)])
        # Nothing is set for the server but its socket: what is measured are the defaults.
        order = {"folder": folder, "count": COUNT, "batch": BATCH, "epochs": EPOCHS, "step_s": STEP_S, "server": {}}
        jobs = [running.enter_context(Process(sys.executable)) for _ in range(JOBS)]
        for job in jobs:
            job.ready()
        figures: dict[str, list[float]] = {"server": [], "loaders": [], "tensorsocket": []}
        for _ in range(rounds):
            spent, facts = with_server(jobs, order)
            figures["server"].append(spent)
            figures["loaders"].append(with_loaders(jobs, order)[0])
            spent, peer = with_tensorsocket(python, order)
            figures["tensorsocket"].append(spent)
    to_loaders = sorted(a / b for a, b in zip(figures["server"], figures["loaders"], strict=True))
    to_peer = sorted(a / b for a, b in zip(figures["server"], figures["tensorsocket"], strict=True))
    middle = statistics.median(to_loaders), statistics.median(to_peer)
    print(json.dumps({
        "bench": "shared_preparation", "baseline": "torch DataLoader, 2 workers each; TensorSocket 0.0.5",
        "jobs": JOBS, "images": COUNT, "rounds": rounds,
        "cpu_ms_per_image": {name: round(1000 * statistics.median(found) / COUNT / EPOCHS, 3)
                             for name, found in figures.items()},
        "order": facts["order"], "prepared": sum(facts["prepared"].values()),
        "tensorsocket_received": peer["received"],
        "ratio": round(middle[0], 3), "ratio_range": [round(to_loaders[0], 3), round(to_loaders[-1], 3)],
        "to_tensorsocket": round(middle[1], 3), "to_tensorsocket_range": [round(to_peer[0], 3), round(to_peer[-1], 3)],
        "claim": "<=0.35 of the DataLoaders, <=0.80 of TensorSocket", "met": middle[0] <= 0.35 and middle[1] <= 0.8,
    }))  # fmt: skip
    return 0 if middle[0] <= 0.35 and middle[1] <= 0.8 else 3


if __name__ == "__main__":
    sys.exit(main())
