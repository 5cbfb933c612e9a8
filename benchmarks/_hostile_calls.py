"""Good files, and calls that read them, of every verb that reads a file of a user's or takes numbers."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from _command import ROOT
from _hostile_samples import Samples

sys.path.insert(0, str(ROOT))  # of the readers, too: they import the model that grows

from tests.growth_models import GPT2

Place = Callable[..., Path]
"""Takes a name and the calls that read it; returns where to write it."""

ACCOUNTED = (
    ("7", "ada", "2026-01-01T00:00:00", "2026-01-01T00:00:30", "2026-01-01T01:00:30", "COMPLETED", "gres/gpu:a100=1"),
    ("8", "bo", "2026-01-01T00:00:10", "2026-01-01T00:00:40", "2026-01-01T02:00:30", "COMPLETED", "gres/gpu:a100=4"),
)
"""Jobs as `sacct -P` prints them."""

CALLS = (
    "parallel simulate --stages 4 --microbatches 8 --forward-ns 10 --backward-ns 20",
    "parallel schedule export --schedule interleaved --stages 4 --microbatches 8 --interleave 2 --comm-ns 3",
    "parallel schedule show --schedule gpipe --stages 4 --microbatches 8 --cap 9",
    "fault plan --mtbf-s 11124 --restart-s 600 --save-s 10 --hosts 512 --p-daily 0.0012",
    "fault plan --mtbf-s 11124 --restart-s 600 --save-s 10 --mesh tp=8,pp=4,dp=16 --ranks-per-host 8",
    "parallel plan --shape KEPT/shape.toml --devices 16 --device A100-SXM4-80GB --devices-per-host 8",
    "parallel plan --profile KEPT/profile.txt --levels 4,4 --bandwidth 1e10,1.25e9 --memory 16GiB",
    "cluster sim --trace KEPT/queue.csv --policy las --devices a100=4,v100=4 --round-s 60 --resize 36000:v100=4",
    "cluster prices --data KEPT/market --model A3C --days 3",
    "cluster fork --speeds 4,2,1 --jobs KEPT/forked.json --slot-s 360",
    "parallel simulate --stages 4 --microbatches 6 --replicas 3 --fail 1:2 --forward-ns 10 --backward-ns 20",
    "parallel replan --replicas 3 --stages 4 --microbatches 6 --fail 1:2",
    "parallel replan --replicas 3 --stages 4 --microbatches 6 --forward-ns 100000000 --trace KEPT/hosts.csv",
    "parallel ntp --units 32 --tp 8 --reduced 7",
    "parallel ntp --tp 8,16,32 --table --devices 32768 --failed 0.001 --pp 8",
    "parallel plan --graph KEPT/layers.json --devices 4 --microbatches 8 --overhead-ns 5",
    "power check KEPT/before --device A100-SXM4-80GB --devices 20000 --spec strict --step-s 0.01",
    "cost transfer --data KEPT/latency.npz --target b --samples 4",
    "model serve --layers KEPT/served.json --cluster KEPT/devices.toml --prompt 64 --new 9 --batch 4 --bits 4,16",
    "storage table --afr 0.02 --mttr-hours 24",
    "storage sim --made tree --requests 200 --designs none,tvarak",
    "ckpt advise --set step_s=0.4 --set save_s=9 --set every=20 --set state=5GB --set mtbf_s=86400",
)
"""Calls whose own words are changed; the files that they name are good."""


def calls(folder: Path) -> Samples:
    """Write one good file for each verb that reads one of a user's, or takes numbers; return as `samples` does.

    In the words of a call FILE is where the file comes (at the end without it), KEPT a folder in which all good files
    lie, and NEW a path of which nothing exists yet.
    """
    made: Samples = {}

    def path(name: str, *commands: str) -> Path:
        words = (command.replace("KEPT", str(folder / "kept")).split() for command in commands)
        made[name] = (folder / name, tuple(map(tuple, words)))
        return folder / name

    for write in (of_jobs, of_plans, of_models, of_stores, of_runs):
        write(path)
    for number, call in enumerate(CALLS):
        path(f"call {number}.txt", "ARGUMENTS").write_text(call.replace("KEPT", str(folder / "kept")))
    (folder / "kept").mkdir()
    for name, (good, _) in made.items():
        copy = shutil.copytree if good.is_dir() else shutil.copy
        copy(good, folder / "kept" / name)
    return made


def of_jobs(path: Place) -> None:
    """Write what `cluster`, `parallel`, `fault`, `power`, `cost` and `comm` read of queues, profiles and powers."""
    compare, sim = "cluster compare --devices a100=8 --jobs", "cluster sim --policy las --devices a100=8 --trace"
    head = ("JobID", "User", "Submit", "Start", "End", "State", "AllocTRES")
    path("sacct.txt", compare, sim).write_text("".join("|".join(row) + "\n" for row in (head, *ACCOUNTED)))
    jobs = [
        {"job_id": 7 + n, "user": "ada", "name": "vit", "time": {"submission": 5 * n, "start": 30, "end": 90 + n},
         "tres": {"allocated": [{"type": "gres", "name": "gpu:a100", "count": 1 + n}]}} for n in range(3)
    ]  # fmt: skip
    path("sacct.json", compare).write_text(json.dumps({"meta": {"slurm": {"release": "24"}}, "jobs": jobs}))
    rows = ["id,arrival_s,run_s,num_devices,start_s,device_type", "a,0,600,1,0,a100", "b,5,1000,2,5,a100"]
    path("queue.csv", sim, compare).write_text("\n".join(rows) + "\n")
    market = path("market", "cluster prices --model A3C --days 3 --data")
    market.mkdir()
    days = [f"us-east-1a,p3.{size}xlarge,{0.9 * size},{1583000000 - n * 86400}" for size in (2, 8) for n in range(9)]
    for name, rows in {
        "aws_spot": ["zone,instance_type,usd_per_h,unix_s", *days], "on_demand": ["device_type,usd_per_h", "v100,2.5"],
        "throughputs": ["model,device_type,steps_per_s", "A3C,v100,3.5", "A3C,k80,1.5"],
    }.items():  # fmt: skip
        (market / f"{name}.csv").write_text("\n".join(rows) + "\n")
    layer = "node{0} -- Conv2d(3) -- forward_compute_time={0}.5, backward_compute_time=2.5, "
    layer += "activation_size=[100.0; 50.0], parameter_size=7000.000"
    edges = [f"\tnode{n} -- node{n + 1}" for n in range(1, 4)]
    profile = "\n".join([layer.format(n) for n in range(1, 5)] + edges) + "\n"
    path("profile.txt", "parallel plan --levels 2,2 --bandwidth 1e10,1.25e9 --profile").write_text(profile)
    shape = {"layers": 8, "hidden": 1024, "heads": 16, "sequence": 1024, "vocabulary": 51200, "batch": 16}
    shape_plan = "parallel plan --devices 16 --device A100-SXM4-80GB --shape"
    path("shape.toml", shape_plan).write_text("".join(f"{key} = {value}\n" for key, value in shape.items()))
    path("order.csv", "parallel schedule check").write_text("0F0,0F1,0B0,0B1\n,1F0,1B0,1F1,1B1\n")
    fleet = {"hosts": 64, "devices_per_host": 8, "days": 20, "per_1000_host_days": 3.5}
    path("fleet.toml", "fault sim").write_text("".join(f"{key} = {value}\n" for key, value in fleet.items()))
    spec = {"ramp_w_per_s": 1e4, "range_w": 1e4, "window_s": 60.0, "band_hz": [0.1, 20.0], "band_rms_w": 1e4}
    power = "power check --spec moderate", "power plan --spec moderate --out NEW.json"
    np.savez(path("power.npz", *power), power_w=5e4 + 4e4 * (np.arange(500) % 50 < 25), step_s=0.02)
    path("spec.toml", "power check KEPT/power.npz --spec").write_text(
        "".join(f"{key} = {value}\n" for key, value in spec.items())
    )
    table = path("latency.npz", "cost transfer --target b --samples 4 --data")
    np.savez(table, ops=np.arange(24).reshape(12, 2) % 3, op_names=["conv", "skip", "pool"], settings=["a", "b"],
             latency_ms=1.0 + np.arange(24).reshape(2, 12))  # fmt: skip
    gradients = {"vgg": {"tensors": [["w", 4096], ["b", 64]], "gap_us": [5.0, 7.0]}}
    setup = {"model": "vgg", "codec": "dgc", "hosts": 4, "ranks_per_host": 8, "inside": "pcie", "wire_fraction": 0.01,
             "two_level": True}  # fmt: skip
    strategy = "comm strategy --model vgg --cost published-gpu"
    for name, content in (("models", gradients), ("setups", [setup])):
        other = {"models": "setups", "setups": "models"}[name]
        path(f"{name}.json", f"{strategy} --{other} KEPT/{other}.json --{name}").write_text(json.dumps(content))


def of_plans(path: Place) -> None:
    """Write what `parallel`, `cluster fork`, `comm` and `power` read beside that."""
    stages = [
        {"name": name, "preds": preds, "forward_ns": 1000, "backward_ns": 2000}
        for name, preds in (("a", []), ("b", ["a"]), ("c", ["a"]), ("d", ["b", "c"]))
    ]
    path("layers.json", "parallel plan --devices 4 --graph").write_text(json.dumps({"layers": stages}))
    path("stages.json", "parallel simulate --microbatches 6 --graph").write_text(json.dumps({"stages": stages}))
    chunks = [{"duration_ns": 9_000_000, "memory_bytes": 5}, {"duration_ns": 4_000_000}]
    fill = {"main": {"stages": 3, "microbatches": 4, "forward_ns": 20_000_000, "free_bytes": 9},
            "jobs": [{"name": "a", "samples": 90, "configurations": [{"chunks": chunks, "samples": 2}]}]}  # fmt: skip
    path("fill.json", "parallel fill --simulate --jobs").write_text(json.dumps(fill))
    hosts = [*((0, "add", n) for n in range(12)), (480_000, "remove", 3), (900_000, "add", 3)]
    path(
        "hosts.csv", "parallel replan --replicas 3 --stages 4 --microbatches 6 --forward-ns 100000000 --trace"
    ).write_text("".join(f"{at},{what},h{n}\n" for at, what, n in hosts))
    forked = [{"name": name, "steps": steps} for name, steps in (("a", 1000), ("b", 500), ("c", 70))]
    path("forked.json", "cluster fork --speeds 4,2,1 --jobs").write_text(json.dumps(forked))
    priced = [
        {"AvailabilityZone": zone, "InstanceType": "p3.2xlarge", "ProductDescription": "Linux/UNIX",
         "SpotPrice": f"{0.9 + 0.01 * day:.6f}", "Timestamp": f"2026-05-{day:02}T03:00:00.000Z"}
        for day in range(20, 0, -1) for zone in ("us-east-1a", "us-east-1b")
    ]  # fmt: skip
    path("prices.json", "cluster prices KEPT/before --device-type v100 --days 3 --data").write_text(
        json.dumps({"SpotPriceHistory": priced})
    )
    strategy = "comm strategy --model vgg --models KEPT/models.json --setups KEPT/setups.json --cost"
    path("options.json", f"{strategy} stages --options").write_text('["flat.all_reduce", "flat.all_reduce"]')
    path("codecs.json", f"{strategy} stages --codecs").write_text(
        json.dumps({"dgc": {"total_us": [10.0, 0.1, 0.01, 0.001], "decode_us": [5.0, 0.1, 0.01, 0.001]}})
    )


def of_models(path: Place) -> None:
    """Write what `model` and `cost` read: checkpoints to grow, hosts to serve on, measured tables."""
    torch.manual_seed(0)
    small, large = ({"width": 8 * n, "layers": n, "heads": n, "hidden": 16 * n} for n in (1, 2))
    grow = "model grow tests.growth_models:GPT2"
    torch.save(
        GPT2(**small).state_dict(),
        path("grown.pt", f"{grow} --small {dense(small)} --large {dense(large)} -o NEW.pt --checkpoint"),
    )
    serve = "model serve --prompt 64 --new 9 --batch 4 --bits 4,16"
    layers = {"layers": 3, "hidden": 256, "heads": 4, "sequence": 128, "vocabulary": 500}
    path("served.json", f"{serve} --cluster KEPT/devices.toml --layers").write_text(json.dumps(layers))
    devices = '[[device]]\nname = "T4"\n[[device]]\nname = "L4"\nlink = "ethernet-25g"\n'
    path("devices.toml", f"{serve} --layers KEPT/served.json --cluster").write_text(devices)
    serve += " --layers KEPT/served.json --cluster KEPT/devices.toml"
    path("omega.json", f"{serve} --sensitivity").write_text(json.dumps({"4": [1.5, 1.0, 2.0]}))
    rows = [
        {"device": device, "bits": bits, "phase": phase, "batch": batch, "tokens": 64, "seconds": 1e-3 * batch}
        for device in ("T4", "L4") for bits in (4, 16) for phase in ("prefill", "decode") for batch in (1, 2, 4)
    ]  # fmt: skip
    path("measured.json", f"{serve} --latency").write_text(json.dumps(rows))


def dense(value: object) -> str:
    """Return JSON without blanks: one word of a call."""
    return json.dumps(value, separators=(",", ":"))


def of_stores(path: Place) -> None:
    """Write what `storage` and `data` read: logs of disks, traces of memory, profiles of pipelines, tables."""
    logs = {
        name: "model,size,n_unique,drive_days,failed\n"
        f"wdc x1,4 TB,5000,{days},{days // 20_000}\nst y,8 TB,3000,{days // 2},{days // 9_000}\n"
        for name, days in (("then", 500_000), ("now", 950_000))
    }
    path("then.csv", "storage fit FILE KEPT/now.csv").write_text(logs["then"])
    path("now.csv", "storage fit KEPT/then.csv").write_text(logs["now"])
    drives = "".join(f"a,4e12,2013-04-{n % 30 + 1:02},2013-12-31,{'2013-12-31' * (n % 9 == 0)}\n" for n in range(99))
    path("drives.csv", "storage fit").write_text("model,capacity_bytes,min_date,max_date,first_fail\n" + drives)
    fleet = '[[dgroup]]\nname = "a"\narrivals = [[0, 9000], [20, 50]]\nafr = [[0, 0.06], [40, 0.01]]\n'
    path("disks.toml", "storage fleet --days 90 --clusters").write_text(fleet)
    path("memory.txt", "storage sim --trace").write_text("# op address size\n\nR 0x40\nW 128 64\nE 10\nW 192\n" * 9)
    table = {"session": [1, 2, 1, 2, 3], "timestamp": [5, 4, 3, 2, 1], "ids": [[1, 2], [3], [1, 2], [], [4]]}
    pq.write_table(pa.table(table), path("log.parquet", "data cluster --by session --time timestamp FILE NEW.parquet"))


def of_runs(path: Place) -> None:
    """Copy recorded runs, which the verbs of most rooms read."""
    power = "power check --spec moderate --device A100-SXM4-80GB"
    alone = ("fault incidents", "data stalls", power, "ckpt advise", "report --out NEW.html", "cluster batch")
    together = ("comm plan --out NEW.json", "why")
    for name, words in (("before", alone), ("ddp-conv", together)):
        shutil.copytree(ROOT / "tests" / "golden" / "runs" / name, path(name, *words))
