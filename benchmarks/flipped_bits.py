"""One flipped bit in a stock checkpoint: does `headway ckpt verify` find it and name the tensor; does torch notice?

Claim: of 100 bits flipped at random places of the `.distcp` files that stock `dcp.save` wrote, at least 99 are found,
with file and tensor, and every one in a tensor's elements. Another 100 are drawn from the containers alone (zip
headers, pickles, directories), which uniform places hardly meet. Peer: stock `dcp.load` of the same flipped files: it
notices when it raises, and is wrong in silence when it returns other values.
"""

import copy
import json
import random
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from _command import headway
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from headway.storage.checks.verification import verify
from headway.storage.formats.dcp import read_metadata
from headway.storage.formats.records import read_saved
from headway.storage.manifest import METADATA

SEED = 20261120
Place = tuple[str, int, str]
"""File, byte, and the name of the tensor or object that it belongs to."""

EMPTY: dict[str, object] = {}
"""What stock dcp.load fills."""


def state() -> dict[str, dict[str, object]]:
    """Return a small model and its AdamW state, after one step."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(96, 96) for _ in range(6)]
    model = torch.nn.Sequential(torch.nn.Embedding(512, 96), *layers, torch.nn.LayerNorm(96)).bfloat16()
    opt = torch.optim.AdamW(model.parameters())
    model(torch.arange(64)).float().square().mean().backward()
    opt.step()
    return {"model": model.state_dict(), "opt": opt.state_dict()}


def places(path: Path) -> tuple[list[Place], list[Place]]:
    """Return the places of the elements of tensors, and of the containers around them."""
    elements, containers = [], []
    for fqn, record in read_metadata((path / METADATA).read_bytes()).records():
        start, stop = record.record_offset, record.record_offset + record.record_bytes
        data = (path / record.file).read_bytes()[start:stop]
        inside: set[int] = set()
        for tensor in read_saved(data, record.file).tensors:
            at, size = read_saved(data, record.file).place_of(tensor)
            inside |= set(range(start + at, start + at + size))
        for at in range(start, stop):
            (elements if at in inside else containers).append((record.file, at, fqn))
    return elements, containers


def stock_load(path: Path) -> dict[str, object] | None:
    """Return what stock dcp.load makes of a checkpoint; None where it raises."""
    target = copy.deepcopy(EMPTY)
    try:
        dcp.load(target, checkpoint_id=path)
    except (Exception, CheckpointException):  # whatever it raises, it has noticed
        return None
    return leaves(target)


def emptied(value: object) -> object:
    """Return a state of the same shape, all zeros."""
    if isinstance(value, dict):
        return {key: emptied(inner) for key, inner in value.items()}
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else value


def leaves(value: object, name: str = "") -> dict[str, object]:
    """Return name -> value of everything below nested dicts and lists."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if pairs is None:
        return {name: value}
    return {key: leaf for at, inner in pairs for key, leaf in leaves(inner, f"{name}.{at}").items()}


def equal(first: dict[str, object], second: dict[str, object]) -> bool:
    """Say whether two states are bit-equal."""

    def bits(value: object) -> object:
        return value.reshape(-1).view(torch.uint8).numpy().tobytes() if isinstance(value, torch.Tensor) else value

    return first.keys() == second.keys() and all(bits(first[name]) == bits(second[name]) for name in first)


def try_flips(
    path: Path, chosen: list[Place], elements: set[Place], good: dict[str, object], draw: random.Random
) -> Counter:
    """Flip one bit at a time; count what `verify` and what stock dcp.load make of it."""
    told: Counter = Counter()
    for file, at, fqn in chosen:
        content = (path / file).read_bytes()
        with open(path / file, "r+b") as stored:
            stored.seek(at)
            stored.write(bytes([content[at] ^ (1 << draw.randrange(8))]))
        report = verify(path)
        here = [damage for damage in report.damaged if damage.file == file]
        told["found"] += bool(report.damaged)
        told["elements_missed"] += (file, at, fqn) in elements and not report.damaged
        told["named"] += bool(here) and {damage.tensor for damage in report.damaged} == {fqn}
        told["placed"] += any(d.offset_bytes <= at < d.offset_bytes + d.num_bytes for d in here)
        loaded = stock_load(path)
        told["stock_raised" if loaded is None else "stock_fine" if equal(loaded, good) else "stock_wrong"] += 1
        (path / file).write_bytes(content)
    return told


def main() -> int:
    """Flip, verify, load; print one JSON line."""
    count = 1000 if "--full" in sys.argv else 100
    warnings.simplefilter("ignore")
    folder, draw = Path(tempfile.mkdtemp()), random.Random(SEED)
    try:
        path, whole = folder / "stock", state()
        EMPTY.update(emptied(whole))
        dcp.save(whole, storage_writer=FileSystemWriter(path, thread_count=2))
        assert headway("ckpt", "verify", path)["status"] == "good", "a good checkpoint is called damaged"
        good = stock_load(path)
        assert good is not None, "stock dcp.load fails on a good checkpoint"
        elements, containers = places(path)
        everywhere = draw.choices(elements + containers, k=count)
        inner = set(elements)
        told = try_flips(path, everywhere, inner, good, draw)
        of_elements = sum(place in inner for place in everywhere)
        around = try_flips(path, draw.choices(containers, k=count), inner, good, draw)
        assert headway("ckpt", "verify", path)["status"] == "good", "the files were not restored"
        files, num_bytes = len(list(path.glob("*.distcp"))), sum(one.stat().st_size for one in path.glob("*.distcp"))
    finally:
        shutil.rmtree(folder)
    met = (
        not told["elements_missed"]
        and min(told["found"], told["named"]) >= 0.99 * count
        and min(around["found"], around["named"]) >= 0.99 * count
    )
    print(json.dumps({
        "bench": "flipped_bits", "flips": count, "of_elements": of_elements,
        "elements_missed": told["elements_missed"], "files": files, "num_bytes": num_bytes,
        "found": told["found"], "named": told["named"], "placed": told["placed"], "container_flips": count,
        "container_found": around["found"], "container_named": around["named"],
        "baseline": f"stock dcp.load, torch {torch.__version__}",
        "stock_raised": told["stock_raised"], "stock_wrong_in_silence": told["stock_wrong"],
        "stock_container_raised": around["stock_raised"], "seed": SEED, "claim": ">=99 of 100", "met": met,
    }))  # fmt: skip
    return 0 if met else 3


if __name__ == "__main__":
    sys.exit(main())
