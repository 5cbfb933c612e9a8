"""Good files of every format that headway reads, and what breaks them: seeded mutations of bytes, texts and folders."""

import gzip
import json
import os
import pickle
import random
import shutil
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from _command import ROOT
from safetensors.torch import save_file

from headway.core.files.planfile import PlanFile, Remedy, write_plan
from headway.trace.events.trace import Trace
from headway.trace.readers import straggler
from headway.trace.readers.formats import save_any

WORDS = (
    b"1e999999999", b"9" * 5000, b"-1", b"true", b"null", b"1.5", b'"[[[["', b"[" * 20_000, b'{"a":' * 20_000,
    b"18446744073709551616", b"[-1,-1]", b'"\\ud800"', b" " * 100_000, b"1e9", b"NaN", b"{}," * 1000, b"[],",
)  # fmt: skip
"""What takes the place of a number or a piece of JSON text."""

INTS = tuple(
    number.to_bytes(size, order, signed=number < 0)
    for size in (2, 4, 8)
    for order in ("little", "big")
    for number in (-1, (1 << (8 * size - 1)) - 1, 1 << (8 * size - 4), 0)
)
"""Numbers in binary that are rarely right."""

Sample = tuple[Path, tuple[tuple[str, ...], ...]]
"""A file or folder, and the commands that read it."""

CKPT = (("ckpt", "verify"), ("ckpt", "show"))
TRACE = (("trace", "info"),)


def samples(folder: Path) -> dict[str, Sample]:
    """Write one good file or folder of each format into `folder`; return name -> where, and what reads it."""
    warnings.simplefilter("ignore")
    made: dict[str, Sample] = {}

    def path(name: str, *commands: tuple[str, ...]) -> Path:
        made[name] = (folder / name, commands)
        return folder / name

    state = {"model": {"w": torch.randn(8, 4), "b": torch.ones(3).bfloat16()}, "lr": 0.1, "ids": list(range(50)),
             "names": {("a", 1): {1, 2}, "opt": [{"betas": (0.9, 0.99)}]}}  # fmt: skip
    torch.save(state, path("new.pt", *CKPT))
    torch.save(state, path("old.pt", *CKPT), _use_new_zipfile_serialization=False)
    summed = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    torch.save(state, path("unsummed.pt", *CKPT))
    torch.serialization.set_crc32_options(summed)
    dcp.save({"model": state["model"], "epoch": 3}, checkpoint_id=path("dcp", *CKPT))
    save_file(state["model"], path("model.safetensors", *CKPT))
    (path("sharded", *CKPT)).mkdir()
    save_file({"w": torch.zeros(3)}, folder / "sharded" / "a.safetensors")
    (folder / "sharded" / "m.safetensors.index.json").write_text('{"weight_map": {"w": "a.safetensors"}}')
    write_plan(PlanFile((Remedy("data.workers", {"num_workers": 2}, 1.8, (1.6, 1.9)),)), path("plan.json", ("PLAN",)))
    shutil.copytree(ROOT / "tests" / "golden" / "runs" / "before", path("run", *TRACE, ("why",), ("plan",)))
    traces(path)
    return made


def traces(path) -> None:
    """Write one good trace of each format."""
    rows = 60
    columns = {
        "rank": np.zeros(rows), "step": np.arange(rows) // 10, "start_ns": np.arange(rows) * 1000,
        "duration_ns": np.full(rows, 900), "name": np.zeros(rows), "lane": np.zeros(rows),
    }  # fmt: skip
    edges = np.stack([np.arange(rows - 1), np.arange(1, rows)])
    trace = Trace.from_columns(columns, names=["add"], lanes=["main"], ranks={0: {}}, edges=edges)
    for name in ("own.parquet", "own.json", "own.json.gz"):
        save_any(trace, path(name, *TRACE))
    save_any(trace, path("graph.0.et", *TRACE))
    operations = straggler.operations(
        {"rank": [0, 1], "start_ns": [0, 7], "duration_ns": [5, 5], "step": [1, 1]},
        optypes=["gc", "optimizer"], coordinates={0: (0, 0), 1: (0, 1)}, sizes=straggler.Sizes(1, 2),
    )  # fmt: skip
    straggler.write(operations, path("trace-a.parquet", *TRACE))
    args = {"correlation": 3, "Collective name": "allreduce", "In msg nelems": 10, "dtype": "Float", "Group size": 2,
            "Process Group Name": "0", "Process Group Ranks": "[0, 1]", "Input Dims": [[2, 3]]}  # fmt: skip
    events = [
        {"ph": "X", "cat": cat, "name": f"op{n % 7}", "pid": 0, "tid": n % 3, "ts": n * 10.5, "dur": 9.25, "args": args}
        for n, cat in enumerate(("cpu_op", "kernel", "cuda_runtime", "user_annotation") * 15)
    ]
    events += [{"ph": "B", "name": "a", "pid": 0, "tid": 1, "ts": 1}, {"ph": "E", "pid": 0, "tid": 1, "ts": 5}]
    text = json.dumps({"distributedInfo": {"rank": 0, "world_size": 2}, "traceEvents": events}).encode()
    path("kineto.json", *TRACE, ("why",)).write_bytes(text)
    path("kineto.json.gz", *TRACE).write_bytes(gzip.compress(text))
    entry = {"process_group": ["0", "default_pg"], "collective_seq_id": 4, "state": "started", "time_created_ns": 7,
             "profiling_name": "nccl:all_reduce", "input_sizes": [[3, 4]], "input_dtypes": ["Float"]}  # fmt: skip
    dump = {"version": "2.4", "rank": 1, "pg_config": {"0": {"name": "0", "ranks": "[0, 1]"}}, "entries": [entry] * 5}
    path("dump.json", *TRACE, ("hang",)).write_text(json.dumps(dump))
    path("dump.pkl", *TRACE, ("hang",)).write_bytes(pickle.dumps(dump, 2))
    lines = [
        {"log_type": "event", "log_type_name": f"fwd_bwd_{side}", "time_us": n, "step": 3, "rank": 0}
        for n, side in enumerate(("start", "end") * 10)
    ]
    path("titan.jsonl", *TRACE).write_text("".join(json.dumps(line) + "\n" for line in lines))


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
    "parallel plan --shape shape.toml --devices 16 --device A100-SXM4-80GB --devices-per-host 8",
    "parallel plan --profile profile.txt --levels 4,4 --bandwidth 1e10,1.25e9 --memory 16GiB",
    "cluster sim --trace queue.csv --policy las --devices a100=4,v100=4 --round-s 60 --resize 36000:v100=4",
    "cluster prices --data market --model A3C --days 3",
)
"""Calls whose own words are changed; the files that they name are good, and lie beside."""


def calls(folder: Path) -> dict[str, Sample]:
    """Write one good file for each verb that reads one of a user's, or takes numbers; return as `samples` does."""
    made: dict[str, Sample] = {}

    def path(name: str, *commands: str) -> Path:
        made[name] = (folder / name, tuple(tuple(command.split()) for command in commands))
        return folder / name

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
    power = "power check --spec moderate", f"power plan --spec moderate --out {folder / 'plan.json'}"
    np.savez(path("power.npz", *power), power_w=5e4 + 4e4 * (np.arange(500) % 50 < 25), step_s=0.02)
    path("spec.toml", f"power check {folder / 'power.npz'} --spec").write_text(
        "".join(f"{key} = {value}\n" for key, value in spec.items())
    )
    table = path("latency.npz", "cost transfer --target b --samples 4 --data")
    np.savez(table, ops=np.arange(24).reshape(12, 2) % 3, op_names=["conv", "skip", "pool"], settings=["a", "b"],
             latency_ms=1.0 + np.arange(24).reshape(2, 12))  # fmt: skip
    gradients = {"vgg": {"tensors": [["w", 4096], ["b", 64]], "gap_us": [5.0, 7.0]}}
    setup = {"model": "vgg", "codec": "dgc", "hosts": 4, "ranks_per_host": 8, "inside": "pcie", "wire_fraction": 0.01,
             "two_level": True}  # fmt: skip
    strategy = "comm strategy --model vgg --cost published-gpu"
    (folder / "kept").mkdir()
    for name, content in (("models", gradients), ("setups", [setup])):
        text = json.dumps(content)
        (folder / "kept" / f"{name}.json").write_text(text)
        other = {"models": "setups", "setups": "models"}[name]
        path(f"{name}.json", f"{strategy} --{other} {folder / 'kept' / other}.json --{name}").write_text(text)
    for number, call in enumerate(CALLS):
        for name in set(call.split()) & set(made):
            copy = shutil.copytree if (folder / name).is_dir() else shutil.copy
            copy(folder / name, folder / "kept" / name)
            call = call.replace(name, str(folder / "kept" / name))
        path(f"call {number}.txt", "ARGUMENTS").write_text(call)
    return made


def mutate(path: Path, draw: random.Random) -> None:
    """Break the file, or one file of the folder, at `path`."""
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        path = draw.choice(files)
        kind = draw.randrange(12)
        if kind < 3:
            path.unlink()
            if kind == 1:
                os.mkfifo(path)
            elif kind == 2:
                path.symlink_to(path.name)
            return
    data = path.read_bytes()
    packed = data[:2] == b"\x1f\x8b" and draw.random() < 0.7
    data = bytearray(gzip.decompress(data) if packed else data)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        change(data, draw)
    path.write_bytes(gzip.compress(data, 1) if packed else data)


def change(data: bytearray, draw: random.Random) -> None:
    """Change bytes in place, in one of the ways that break readers."""
    at = draw.randrange(len(data) + 1) if data else 0
    size = draw.choice((1, 1, 2, 4, 8, 30, 300))
    kind = draw.randrange(11)
    if kind == 9:
        digits(data, draw)
    elif kind == 10:
        entries(data, draw)
    elif kind < 2 and data:
        data[min(at, len(data) - 1)] ^= 1 << draw.randrange(8)
    elif kind == 2:
        data[at : at + size] = bytes(draw.randrange(256) for _ in range(size))
    elif kind == 3:
        del data[at : at + size]
    elif kind == 4:
        data[at:at] = data[at : at + size] * draw.choice((1, 3, 200))
    elif kind == 5:
        word = draw.choice(INTS)
        data[at : at + len(word)] = word
    elif kind == 6:
        del data[at:]
    else:
        text(data, draw)


def digits(data: bytearray, draw: random.Random) -> None:
    """Change a digit of a number, or give it a few or hundreds more."""
    places = [at for at, byte in enumerate(data) if byte in b"0123456789"]
    if places:
        at = draw.choice(places)
        data[at : at + 1] = str(draw.randrange(10)).encode() * draw.choice((1, 1, 2, 20, 301))


def entries(data: bytearray, draw: random.Random) -> None:
    """Repeat an entry of a list, once or many times."""
    commas = [at for at, byte in enumerate(data) if byte in b","]
    if len(commas) > 1:
        place = draw.randrange(len(commas) - 1)
        first, last = commas[place], commas[place + 1]
        data[first:first] = data[first:last] * draw.choice((1, 2, 62, 300))


def text(data: bytearray, draw: random.Random) -> None:
    """Put a value that JSON readers trip over in the place of a number or a text."""
    marks = [at for at, byte in enumerate(data) if byte in b':[,"']
    if not marks:
        return
    begin = draw.choice(marks) + 1
    stop = begin
    while stop < len(data) and data[stop] not in b',]}"':
        stop += 1
    data[begin:stop] = draw.choice(WORDS)
