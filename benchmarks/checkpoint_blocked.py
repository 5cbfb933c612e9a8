"""How long a save keeps the training thread: Checkpointer against stock dcp.save and ByteCheckpoint.

Two gloo ranks with a DDP model and its Adam state, 192 MB that both hold alike, on tmpfs and on disk. Claim (BC2): the
thread is blocked at least 8 times shorter than by dcp.save, and at least 4 times shorter than by bytecheckpoint 0.0.2
(`fast_saving`, its asynchronous mode). Rounds are interleaved in one run, each side's earlier save is done before its
next begins, and the last checkpoint of each is loaded and compared bit for bit. The blocked time is that of the slower
rank; ratios are medians over rounds. `--full` makes four times as many rounds.
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from _command import on_two_ranks
from peers.env import packages_of

JOB = """
import json, os, shutil, sys, time, warnings
from pathlib import Path

warnings.simplefilter("ignore")
import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import headway

sys.path.append(os.environ["PEER"])
import bytecheckpoint

LAYERS, WIDTH = 16, 1000


def main():
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=os.environ["STORE"])
    folder = Path(os.environ["FOLDER"])
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    model = torch.nn.parallel.DistributedDataParallel(net)
    opt = torch.optim.Adam(model.parameters())
    model(torch.randn(2, WIDTH)).sum().backward()
    opt.step()
    ckpt = headway.Checkpointer(folder / "headway", model=net, opt=opt)
    number = 0

    def ours():
        ticket = ckpt.save(number)
        return ticket.result

    def stock():
        dcp.save({"model": net.state_dict(), "opt": opt.state_dict()}, checkpoint_id=folder / f"dcp-{number}")
        return lambda: shutil.rmtree(folder / f"dcp-{number - 1}", ignore_errors=True) if rank == 0 else None

    def peer():
        bytecheckpoint.save(str(folder / f"bcp-{number}"), {"model": model, "optimizer": opt}, framework="ddp",
            fast_saving=True)

        def done():
            until = time.monotonic() + 60  # its files appear under their own names once they are whole
            while not list((folder / f"bcp-{number}").rglob(".metadata")) and time.monotonic() < until:
                time.sleep(0.02)
            time.sleep(0.5)
            dist.barrier()
            if rank == 0:
                shutil.rmtree(folder / f"bcp-{number - 1}", ignore_errors=True)
        return done

    methods = {"headway": ours, "dcp.save": stock, "bytecheckpoint": peer}
    took = {name: [] for name in methods}
    for number in range(int(os.environ["ROUNDS"]) + 2):
        for name, method in methods.items():
            dist.barrier()
            begun = time.perf_counter()
            finish = method()
            took[name].append(time.perf_counter() - begun)
            finish()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(1.0)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.sub_(1.0)
    ckpt.close()
    expected = {key: value.clone() for key, value in net.state_dict().items()}
    equal = {}
    for name, place in (("headway", folder / "headway" / f"step-{number}"), ("dcp.save", folder / f"dcp-{number}")):
        found = {key: torch.zeros_like(value) for key, value in expected.items()}
        dcp.load({"model": found}, checkpoint_id=place)
        equal[name] = all(torch.equal(found[key], value) for key, value in expected.items())
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    bytecheckpoint.load(str(folder / f"bcp-{number}"), {"model": model, "optimizer": opt}, framework="ddp")
    equal["bytecheckpoint"] = all(torch.equal(net.state_dict()[key], value) for key, value in expected.items())
    answer = {"took": {name: times[2:] for name, times in took.items()}, "equal": equal}  # two rounds warm all up
    Path(os.environ["ANSWER"]).write_text(json.dumps(answer))
    dist.barrier()
    for child in psutil.Process().children(recursive=True):
        child.kill()  # the peer's processes, which would hold our pipes open
    os._exit(0)


if __name__ == "__main__":
    main()
"""

CLAIMS = {"dcp.save": 8.0, "bytecheckpoint": 4.0}


def measured(place: str | None, rounds: int) -> dict[str, list[float]]:
    """Return method -> blocked seconds per round, of the slower rank."""
    with tempfile.TemporaryDirectory(prefix="headway-blocked-", dir=place, ignore_cleanup_errors=True) as name:
        peer = str(packages_of("bytecheckpoint"))
        ranks = on_two_ranks(JOB, Path(name), timeout_s=60 * rounds, ROUNDS=str(rounds), PEER=peer)
    assert all(all(rank["equal"].values()) for rank in ranks), f"a checkpoint differs: {[r['equal'] for r in ranks]}"
    return {
        name: [max(pair) for pair in zip(*(r["took"][name] for r in ranks), strict=True)] for name in ranks[0]["took"]
    }


def main() -> int:
    """Measure on tmpfs and on disk; print one JSON line."""
    rounds = 24 if "--full" in sys.argv else 5
    places = {"tmpfs": measured("/dev/shm", rounds), "disk": measured(None, rounds)}
    ratios = {
        f"{peer} on {place}": sorted(theirs / mine for mine, theirs in zip(took["headway"], took[peer], strict=True))
        for place, took in places.items()
        for peer in CLAIMS
    }
    medians = {name: statistics.median(values) for name, values in ratios.items()}
    met = all(median >= CLAIMS[name.partition(" ")[0]] for name, median in medians.items())
    least = min((name for name in medians if name.startswith("dcp")), key=lambda name: medians[name])
    print(json.dumps({
        "bench": "checkpoint_blocked", "mb": 192, "rounds": rounds,
        "blocked_s": {p: {n: round(statistics.median(t), 4) for n, t in took.items()} for p, took in places.items()},
        "ratios": {name: round(median, 2) for name, median in medians.items()}, "ratio": round(medians[least], 2),
        "ratio_range": [round(ratios[least][0], 2), round(ratios[least][-1], 2)],
        "baseline": f"torch {torch.__version__} dcp.save, bytecheckpoint 0.0.2", "claim": ">=8 and >=4, both places",
        "met": met,
    }))  # fmt: skip
    return 0 if met else 3


if __name__ == "__main__":
    sys.exit(main())
