"""Files made to hurt the reader: each costs one clear error, and no more memory or time than its bytes are worth."""

import gzip
import io
import json
import os
import pickle
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.hostile_files import Reader, bounds_of, size_of
from headway.checkpoint.torch_dcp.sources import open_source
from headway.cluster.queue.logs import PHILLY
from headway.core.errors import FormatError
from headway.core.files.safe_files import number_of, read_table
from tests.launching import refusal
from tests.paths import ROOT

SLOW_HOST = 4
"""How many times slower a host may be than those on which the bound of CPU time was set."""

VERIFY, SHOW, INFO = ("ckpt", "verify"), ("ckpt", "show"), ("trace", "info")


def pickled(data: bytes) -> bytes:
    """Return a torch.save archive around a pickle."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a/data.pkl", data)
    return file.getvalue()


def bomb() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", b"\x80\x02N.", zipfile.ZIP_STORED)
        archive.writestr("a/data/0", bytes(200_000_000))
    return file.getvalue()


def shared_payload(lines: int) -> bytes:
    """Return an archive whose directory has many lines for one entry."""
    whole = pickled(b"\x80\x02N." + bytes(100_000))
    start = struct.unpack_from("<I", whole, len(whole) - 6)[0]
    line = whole[start:-22]
    end = struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, lines, lines, lines * len(line), start, 0)
    return whole[:start] + line * lines + end


def safetensors(head: object) -> bytes:
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return struct.pack("<Q", len(text)) + text + bytes(8)


def kineto(**event: object) -> bytes:
    row = {"ph": "X", "cat": "cpu_op", "name": "x", "pid": 0, "tid": 0, "ts": 1, "dur": 1, **event}
    return json.dumps({"traceEvents": [row]}).replace('"RAW ', "").replace(' RAW"', "").encode()


def dump(**entry: object) -> bytes:
    return pickle.dumps({"entries": [entry], "pg_config": {}})


def parquet(metadata: dict[bytes, bytes], rows: int = 1) -> bytes:
    file = io.BytesIO()
    table = pa.table({"optype": pa.array(["gc"]).take(pa.array([0] * rows))}).replace_schema_metadata(metadata)
    pq.write_table(table, file)
    return file.getvalue()


DEEP = 200_000
RANGE = b"\x80\x02c__builtin__\nlist\nc__builtin__\nrange\n"
SAVED = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
COLLECTIVE = {"Collective name": "allreduce", "Process Group Name": "1"}
ATTACKS = {
    "list of a range.pt": (lambda: pickled(RANGE + b"J\x00\xe1\xf5\x05\x85R\x85R."), 3),
    "keys in keys.pt": (lambda: pickled(b"\x80\x02})" + b"\x85" * DEEP + b"Ns."), 3),
    "a key that doubles.pt": (lambda: pickled(b"\x80\x02})" + b"2\x86" * 60 + b"Ns."), 3),
    "a value that doubles.pt": (lambda: pickled(b"\x80\x02]" + b"2\x86" * 60 + b"."), 2),
    "lists in lists.pt": (lambda: pickled(b"\x80\x02" + b"]" * DEEP + b"a" * (DEEP - 1) + b"."), 3),
    "a long number.pt": (lambda: pickled(b"\x80\x02F" + bytes(40_000_000) + b"\n."), 3),
    "empty lists.pt": (lambda: pickled(b"\x80\x02](" + b"]" * 3_000_000 + b"e."), 2),
    "colliding keys.pt": (
        lambda: pickled(b"\x80\x02}(" + b"".join(b"\x8a\x0a" + (k * (2**61 - 1)).to_bytes(10, "little") + b"N"
                                         for k in range(16, 60_000)) + b"u."), 3),
    "bomb.pt": (lambda: bomb(), 3),
    "shared payload.pt": (lambda: shared_payload(20_000), 3),
    "shape of truth.safetensors": (lambda: safetensors({"w": {**SAVED, "shape": [True, 2]}}), 3),
    "shape of halves.safetensors": (lambda: safetensors({"w": {**SAVED, "shape": [0.5, 4]}}), 3),
    "huge shape.safetensors": (lambda: safetensors({"w": {**SAVED, "shape": [10**300] * 64}}), 3),
    "negative shape.safetensors": (lambda: safetensors({"w": {**SAVED, "shape": [-1, -2]}}), 3),
    "metadata is a number.safetensors": (lambda: safetensors({"w": SAVED, "__metadata__": 5}), 3),
    "metadata is no text.safetensors": (lambda: safetensors({"w": SAVED, "__metadata__": {"a": 1}}), 3),
    "deep.safetensors": (lambda: safetensors(b'{"a":' * DEEP), 3),
    "deep.safetensors.index.json": (lambda: b'{"weight_map":' + b"[" * DEEP, 2),
    "deep.json": (lambda: b'{"traceEvents": [{"ph": "X", "args": ' + b"[" * DEEP, 2),
    "exponent.json": (lambda: kineto(ts="RAW 1e999999999 RAW"), 2),
    "digits.json": (lambda: kineto(ts="RAW " + "9" * 5_000_000 + " RAW"), 2),
    "large group.json": (lambda: kineto(args={**COLLECTIVE, "Group size": 1e9, "Global rank stride": 1}), 0),
    "deep ranks.json": (lambda: kineto(args={**COLLECTIVE, "Process Group Ranks": "[" * DEEP}), 0),
    "blanks.json.gz": (lambda: gzip.compress(b'{"traceEvents": [' + b" " * 300_000_000, 1), 2),
    "empty events.json": (lambda: b'{"traceEvents": [' + b"{}," * 3_000_000 + b"{}]}", 2),
    "deep dump.json": (lambda: b'{"entries": ' + b"[" * DEEP + b', "pg_config": 1', 2),
    "doubling text.pkl": (lambda: b"\x80\x02}(X\x07\x00\x00\x00entries](}(X\x0e\x00\x00\x00profiling_name)"
                          + b"2\x86" * 60 + b"ueu.", 2),
    "huge shapes.pkl": (lambda: dump(input_sizes=[[2**62] * 60], input_dtypes=["Float"]), 2),
    "deep.jsonl": (lambda: b'{"log_type_name": "a_start", "time_us": 1, "more": ' + b"[" * DEEP + b"\n", 2),
    "large time.jsonl": (lambda: b'{"log_type_name": "a_start", "time_us": 18446744073709551615}\n', 2),
    "many nodes.et": (lambda: b"\x08\n\x060.0.50" + b"\x00" * 2_000_000, 2),
    "deep sizes.parquet": (lambda: parquet({b"headway.sizes": b"[" * DEEP}), 2),
    "deep tables.parquet": (lambda: parquet({b"headway.trace": b'{"schema":' * DEEP}), 2),
    "many rows.parquet": (lambda: parquet({}, rows=5_000_000), 2),
}  # fmt: skip
"""File -> what makes its bytes, and what reading it exits with."""


@pytest.fixture(scope="module")
def reader(tmp_path_factory) -> Reader:
    """A child that reads; libraries that the first file of a kind loads are not counted."""
    folder, child = tmp_path_factory.mktemp("good"), Reader()
    for name, data in (("a.pt", pickled(b"\x80\x02N.")), ("a.json", kineto()), ("a.parquet", parquet({}))):
        (folder / name).write_bytes(data)
        for command in (VERIFY, SHOW, INFO):
            child.ask(command, folder / name)
    return child


def read(reader: Reader, command: tuple[str, ...], path: Path) -> dict[str, object]:
    """Read a file in a child; hold what it cost to the bound. Without bounds such files cost minutes."""
    answer = reader.ask(command, path)
    for key, bound in bounds_of(size_of(path)).items():
        slack = SLOW_HOST if key == "cpu_s" else 1
        assert answer[key] <= slack * bound, f"{key}: {answer[key]} of {bound}; {answer['code']}"
    return answer


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
def test_a_hostile_file_is_one_clear_error_within_its_bound(name, reader, tmp_path):
    make, code = ATTACKS[name]
    path = tmp_path / name
    path.write_bytes(make())

    is_checkpoint = ".pt" in name or "safetensors" in name
    assert read(reader, VERIFY if is_checkpoint else INFO, path)["code"] == code
    if is_checkpoint:
        assert read(reader, SHOW, path)["code"] in (2, 3)


@pytest.mark.parametrize("place", ["a.pt", "a.json", "c/.metadata", "run/run.json", "run/events/a0-r0.parquet"])
def test_a_fifo_in_the_place_of_a_file_is_refused(place, reader, tmp_path):
    path = tmp_path / place
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)
    commands = [INFO] if "run" in place or "json" in place else [VERIFY, SHOW]

    top = tmp_path / place.partition("/")[0]
    assert {read(reader, command, top)["code"] for command in commands} <= {2, 3}


def test_an_integer_of_ten_thousand_digits_is_shown(reader, tmp_path):
    path = tmp_path / "a.pt"
    path.write_bytes(pickled(pickle.dumps({"large": 1 << 40_000, "small": 7}, 2)))

    assert (read(reader, VERIFY, path)["code"], read(reader, SHOW, path)["code"]) == (0, 0)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("parallel simulate --stages 4 --microbatches 8 --forward-ns 9223372036854775808 --backward-ns 2", "at most"),
        ("parallel schedule export --schedule interleaved --interleave 4294967296", "at most 262,144"),
        (f"fault plan --mtbf-s 1e4 --restart-s 60 --save-s 1 --mesh tp={10**30},dp=2 --ranks-per-host 8", "524,288"),
        ("parallel plan --shape {} --devices 16 --device A100-SXM4-80GB --devices-per-host 4294967296", "1,000,000"),
        ("cluster sim --trace {} --policy las --devices a100=4 --round-s 60", "pass --round-s 42950"),
        ("fault sim {}", "at most 100,000"),
        ("storage fleet --synthetic step --days 100000000000000000000", "1 to 36,500 days"),
        ("storage sim --made tree --requests 100000000000000", "at most 5000000"),
    ],
)
def test_a_size_that_nobody_can_wait_for_is_refused_with_its_bound(call, says, tmp_path):
    names = {"parallel": "shape.toml", "cluster": "queue.csv", "fault": "fleet.toml"}
    path = tmp_path / names.get(call.split()[0], "fleet.toml")
    path.write_text({
        "shape.toml": "layers = 8\nhidden = 1024\nheads = 16\nsequence = 1024\nvocabulary = 51200\nbatch = 16\n",
        "queue.csv": "id,arrival_s,run_s,num_devices\n1,0,4294967296,1\n",
        "fleet.toml": "hosts = 64\ndevices_per_host = 8\ndays = 1e30\nmtbf_s = 1e4\n",
    }[path.name])  # fmt: skip
    assert says in refusal(*call.format(path).split())


def test_a_table_of_another_program_is_read_in_its_encoding_and_a_cut_line_is_named(tmp_path):
    path = tmp_path / "sacct.txt"
    path.write_bytes("a|b\nM\xfcller|2\n".encode("latin-1"))
    assert list(read_table(path, ["a"], "|")) == [(2, {"a": "M\xfcller", "b": "2"})]
    path.write_bytes(b"a|b\n1|2\n1")
    with pytest.raises(FormatError, match=r"sacct\.txt:3 has fewer columns than the header"):
        list(read_table(path, ["a"], "|"))
    for value in ("2020-03-01", "inf", "nan", 10**400, True, None):
        with pytest.raises(FormatError, match=r"p\.csv:2 has .* where a number from 0 to 1e\+15 belongs"):
            number_of(value, "p.csv:2")


@pytest.mark.parametrize(
    ("names", "call"),
    [(PHILLY, "cluster compare --devices a=1 --jobs FILE"), (("session", "time"), "data cluster FILE NEW.parquet")],
)
def test_a_page_of_parquet_that_is_broken_is_one_error_wherever_it_is_read(names, call, reader, tmp_path):
    path = tmp_path / "jobs.parquet"
    pq.write_table(pa.table({name: np.arange(3000) * 7919 % 1000 for name in names}), path, use_dictionary=False)
    data = bytearray(path.read_bytes())
    data[60:400] = b"\xff" * 340  # the first page; the footer is good
    path.write_bytes(data)

    assert reader.ask(tuple(call.split()), path)["code"] == 2
    assert [*tmp_path.iterdir()] == [path]


def test_arguments_and_indexes_that_are_nested_without_end_are_one_error(tmp_path):
    (tmp_path / "m.safetensors.index.json").write_text("[" * 200_000)
    with pytest.raises(FormatError, match="is nested too deep"):
        open_source(tmp_path / "m.safetensors.index.json")
    sizes = ["--small", "{}", "--large", '{"a":' + "[" * 200_000, "--checkpoint", str(tmp_path), "-o", "x.pt"]
    assert "is nested too deep" in refusal("model", "grow", "tests.growth_models:GPT2", *sizes)


@pytest.mark.slow
def test_mutations_of_every_format_and_call_end_in_no_traceback_and_within_the_bound():
    command = [sys.executable, "benchmarks/hostile_files.py", "--files=300"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["met"]
