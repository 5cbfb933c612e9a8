"""Arrays of an NPZ file that a stranger may have written, read within bounds.

>>> import tempfile
>>> path = Path(tempfile.mkdtemp()) / "a.npz"
>>> np.savez(path, power_w=[1.0, 2.0])
>>> read_arrays(path, ["power_w"])
[array([1., 2.])]
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import FormatError, InputError
from headway.core.files.bounds import check_room, unpacked_room
from headway.core.files.regular_file import read_regular


def read_arrays(path: str | Path, names: Sequence[str]) -> list[NDArray[Any]]:
    """Return the arrays of these names. Raises `InputError` where the file cannot be read, `FormatError` otherwise."""
    try:
        packed = read_regular(path)
    except OSError as cause:
        raise InputError(f"cannot read {path}: {cause.strerror}. Give the path of an NPZ file.") from cause
    try:
        size = sum(entry.file_size for entry in zipfile.ZipFile(io.BytesIO(packed)).infolist())
        check_room(size, unpacked_room(len(packed)), str(path), "arrays")
        with np.load(io.BytesIO(packed), allow_pickle=False) as found:
            if absent := [name for name in names if name not in found]:
                needed = ", ".join(names)
                raise FormatError(f"{path} has no array {absent[0]!r}; it needs {needed}. Write it so.")
            return [found[name] for name in names]
    except FormatError:
        raise
    except Exception as error:  # numpy's reader evaluates headers: foreign bytes make it raise anything
        raise FormatError(f"{path} cannot be read as NPZ: {error}. Write it with numpy.savez.") from error
