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

Samples = dict[str, Sample]
"""Name -> sample."""

CKPT = (("ckpt", "verify"), ("ckpt", "show"))
TRACE = (("trace", "info"),)


def samples(folder: Path) -> Samples:
    """Write one good file or folder of each format into `folder`; return name -> where, and what reads it."""
    warnings.simplefilter("ignore")
    made: Samples = {}

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
