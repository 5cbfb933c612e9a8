"""Saved state of whatever format as named tensors whose boxes are read one at a time: for conversion.

Checkpoints of headway's and of stock DCP, safetensors files (one, or many
under an index), and files of torch.save. What has digests is verified as it
is read. A torch.save file is mapped and read by torch's restricted
unpickler; nested keys are joined by dots, as DCP does.

>>> import tempfile
>>> from safetensors.torch import save_file
>>> path = Path(tempfile.mkdtemp()) / "a.safetensors"
>>> save_file({"w": torch.arange(6.0).view(2, 3)}, path)
>>> with open_source(path) as source:
...     source.tensors, source.tensor("w", Box((1, 0), (1, 3))).tolist()
({'w': ((2, 3), 'float32')}, [[3.0, 4.0, 5.0]])
"""

from __future__ import annotations

import io
import mmap
import pickle
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from headway.checkpoint.layout.stored import open_stored
from headway.checkpoint.restores.restore import CheckpointReading
from headway.checkpoint.restores.restore_targets import unpack
from headway.checkpoint.saves.image import pickled
from headway.checkpoint.state.shards import LocalShard, local_shards
from headway.core.errors import DamageError, FormatError, InputError
from headway.core.files.safe_files import open_regular, read_json
from headway.runtime.torch_state import RNG_STATE, branched
from headway.storage.boxes import Box, whole
from headway.storage.formats.values import FROM_SAFETENSORS
from headway.storage.formats.zip_files import faults, is_zip
from headway.storage.manifest import COMMIT, METADATA

INDEX = ".safetensors.index.json"
"""How the name of an index over several safetensors files ends."""

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
"""How files of torch.save are called."""


class SavedState(ABC):
    """Saved state; close it, or use it as a context."""

    def __init__(self, place: str) -> None:
        self.place = place
        """Where it is, as a person names it."""
        self.tensors: dict[str, tuple[tuple[int, ...], str]] = {}
        """Name -> shape and element type."""
        self.paths: dict[str, tuple[str | int, ...]] = {}
        """Name -> keys in the nested state, where they are known."""
        self.step: int | None = None
        """Its step, where it says."""

    @abstractmethod
    def tensor(self, fqn: str, box: Box | None = None) -> torch.Tensor:
        """Return the elements of a box of a tensor, or of all of it, on the host; nobody else's memory."""

    def records(self, fqn: str, world_size: int) -> dict[int | None, tuple[bytes, bool]]:
        """Return an object for `world_size` ranks: whose (None: everybody's) -> what torch.save makes of it, and
        whether any world size may take it. Raises `InputError` where there is none for all of them.
        """
        raise InputError(f"{self.place} has no object {fqn!r}. Name one that it has: headway ckpt show")

    def value(self, fqn: str) -> Any:
        """Return an object. Raises `InputError` where loading it might run code of whoever wrote it."""
        raise InputError(f"{self.place} has no object {fqn!r}. Name one that it has: headway ckpt show")

    @property
    def objects(self) -> list[str]:
        """Return the names of what is no tensor."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Close its files."""

    def __enter__(self) -> SavedState:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()


class CheckpointSource(SavedState):
    """A checkpoint of headway's, or of stock DCP."""

    def __init__(self, folder: Path) -> None:
        """Open the folder; raises as `open_stored` does."""
        super().__init__(str(folder))
        self._stored = open_stored(folder, unpack=unpack)
        self._reading = CheckpointReading(self._stored, "read", None)
        self.tensors, self.paths, self.step = self._stored.tensors, self._stored.paths, self._stored.step

    @property
    def objects(self) -> list[str]:
        """Return the names of what is no tensor."""
        return list(self._stored.objects)

    def tensor(self, fqn: str, box: Box | None = None) -> torch.Tensor:
        """Return elements, verified. Raises `DamageError` naming file, byte and tensor."""
        shape, dtype = self.tensors[fqn]
        box = whole(shape) if box is None else box
        memory = torch.empty(box.lengths, dtype=getattr(torch, dtype))
        if box.num_elements:
            self._reading.read([LocalShard(fqn, shape, box, memory, ())], 1)
        return memory

    def records(self, fqn: str, world_size: int) -> dict[int | None, tuple[bytes, bool]]:
        """Return an object's record, or each rank's own."""
        entries, old = self._stored.objects[fqn], self._stored.world_size or 1
        wanted: dict[int | None, int | None]
        if None in entries:
            wanted = dict.fromkeys(range(world_size) if fqn == RNG_STATE and old == 1 else [None])
        elif old == world_size or all(entry.any_world for entry in entries.values()):
            wanted = {rank: min(rank, old - 1) for rank in range(world_size)}
        else:
            raise InputError(
                f"'{fqn}' was saved by each of {old} ranks for itself; there is none for each of {world_size}. Reshard "
                f"to {old} ranks, or leave it out: --without {fqn.partition('.')[0]}"
            )
        found = {
            rank: (bytes(self._reading.record(entries[whose])), entries[whose].any_world)
            for rank, whose in wanted.items()
            if whose in entries
        }
        if fqn == RNG_STATE and None not in found:  # else they are in step: what all have alike is stored once
            for rank in range(old, world_size):
                state = torch.load(io.BytesIO(found[rank][0]), weights_only=True)
                found[rank] = pickled(branched(state, rank)), found[rank][1]
        return found

    def value(self, fqn: str) -> Any:
        """Return an object: that of everybody, or of the lowest rank."""
        return self._reading.load(next(iter(self._stored.objects[fqn].values())), trust=self._stored.ours)

    def close(self) -> None:
        """Close the files."""
        self._stored.close()


class SafetensorsSource(SavedState):
    """Safetensors files: one, or those that an index names."""

    def __init__(self, path: Path) -> None:
        """Open the file or the index. Raises `FormatError` for what is none."""
        super().__init__(str(path))
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        for file in _named_by(path) if path.name.endswith(".json") else [path]:
            try:
                opened = self._stack.enter_context(safe_open(str(file), framework="pt"))
            except (SafetensorError, OSError) as cause:
                self.close()
                raise FormatError(f"{file} cannot be read ({cause}). Check it: headway ckpt verify") from cause
            for name in opened.keys():  # noqa: SIM118 - no mapping: it has keys() alone
                facts = opened.get_slice(name)
                self._files[name] = opened
                self.tensors[name] = (tuple(facts.get_shape()), FROM_SAFETENSORS[facts.get_dtype()])
                self.paths[name] = (name,)

    def tensor(self, fqn: str, box: Box | None = None) -> torch.Tensor:
        """Return elements."""
        shape, _ = self.tensors[fqn]
        opened = self._files[fqn]
        if box is None or box.lengths == shape:
            found: torch.Tensor = opened.get_tensor(fqn)
            return found
        part: torch.Tensor = opened.get_slice(fqn)[box.within(whole(shape))]
        return part

    def close(self) -> None:
        """Close the files."""
        self._files.clear()
        self._stack.close()


class StateSource(SavedState):
    """State in memory: a nested mapping of tensors and values."""

    def __init__(self, place: str, state: Mapping[str, Any]) -> None:
        """Name what the mapping holds."""
        super().__init__(place)
        found = local_shards(state)
        self._tensors = {shard.fqn: shard.tensor for shard in found.shards}
        self._objects = found.objects
        self.tensors, self.paths = found.tensors, found.paths

    @property
    def objects(self) -> list[str]:
        """Return the names of what is no tensor."""
        return list(self._objects)

    def tensor(self, fqn: str, box: Box | None = None) -> torch.Tensor:
        """Return elements."""
        found = self._tensors[fqn]
        return found[box.within(whole(found.shape))] if box is not None else found

    def records(self, fqn: str, world_size: int) -> dict[int | None, tuple[bytes, bool]]:
        """Return an object's record."""
        return {None: (pickled(self._objects[fqn]), False)}

    def value(self, fqn: str) -> Any:
        """Return an object."""
        return self._objects[fqn]

    def close(self) -> None:
        """Let the tensors go."""
        self._tensors.clear()


class TorchSource(StateSource):
    """A file of torch.save: a nested mapping of tensors and values."""

    def __init__(self, path: Path) -> None:
        """Check the sums of an archive, which torch does not, and map the file.

        Raises `DamageError` where bytes of it have changed, `FormatError` for what is none, `InputError` for more than
        plain values.
        """
        _check_sums(path)
        try:
            state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except pickle.UnpicklingError as cause:
            raise InputError(
                f"{path} holds more than tensors and plain values, so that loading it may run code of whoever wrote "
                "it. Save its state dicts alone."
            ) from cause
        except Exception as cause:  # torch's reader of foreign bytes raises anything, in many lines
            reason = " ".join(str(cause).split()) or type(cause).__name__
            raise FormatError(f"{path} cannot be read ({reason[:200]}). Check it: headway ckpt verify") from cause
        if not isinstance(state, Mapping):
            raise FormatError(
                f"{path} holds a {type(state).__name__}, no mapping of names to tensors. Save a state dict."
            )
        super().__init__(str(path), state)


def _check_sums(path: Path) -> None:
    """Raise `DamageError` naming the entry of an archive whose bytes are not those of its checksum."""
    with open_regular(path) as file:
        if not is_zip(file.read(4)):
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            fault = next((fault for fault in faults(data) if fault.what == "payload"), None)
    if fault is not None:
        raise DamageError(
            f"{path} is damaged: {fault.entry}, {fault.num_bytes} bytes from {fault.offset} on, has another checksum "
            "than was written. Use another copy."
        )


def open_source(path: Path | SavedState) -> SavedState:
    """Open saved state of any of the formats. Raises `FormatError` naming them for what is none.

    What is a source already is returned.
    """
    if isinstance(path, SavedState):
        return path
    if path.is_dir():
        if (path / METADATA).exists() or (path / COMMIT).exists():
            return CheckpointSource(path)
        found = sorted(path.glob(f"*{INDEX}")) or sorted(path.glob("*.safetensors"))
        if len(found) == 1:
            return SafetensorsSource(found[0])
        raise FormatError(
            f"{path} is no checkpoint: it holds neither {METADATA} nor one safetensors file or index. Name a step's "
            "folder, or a file."
        )
    if not path.exists():
        raise InputError(f"{path} does not exist. Name a checkpoint's folder, or a file.")
    if path.name.endswith((".safetensors", INDEX)):
        return SafetensorsSource(path)
    if path.suffix in TORCH_SUFFIXES:
        return TorchSource(path)
    raise FormatError(
        f"{path.name} has a suffix that says no format. Name a checkpoint's folder, or a file that ends in "
        f".safetensors, {INDEX}, {', '.join(TORCH_SUFFIXES)}."
    )


def _named_by(index: Path) -> list[Path]:
    """Return the files that an index names."""
    try:
        names = set(read_json(index)["weight_map"].values())
    except (ValueError, TypeError, KeyError, AttributeError) as cause:
        raise FormatError(f"{index} is no index of safetensors files ({cause}). Name the file itself.") from cause
    return [index.parent / Path(name).name for name in sorted(names)]
