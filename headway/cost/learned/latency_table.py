"""Measured latencies of many architectures on many settings (device and batch size), checked once when they are read.

>>> table = LatencyTable(("conv", "skip"), np.array([[0, 1], [0, 0]]), ("a_1", "b_1"), np.array([[1.0, 2], [3, 5]]))
>>> table.one_hot().tolist()
[[1.0, 0.0, 0.0, 1.0], [1.0, 0.0, 1.0, 0.0]]
>>> table.rows(["b_1"]).tolist()
[[3.0, 5.0]]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import FormatError, InputError
from headway.core.files.arrays import read_arrays
from headway.core.tables import pick

FIELDS = ("ops", "op_names", "settings", "latency_ms")
"""Arrays of a file of latencies."""


@dataclass(frozen=True, slots=True, eq=False)
class LatencyTable:
    """Latencies of `n` architectures of equal depth under `s` settings."""

    op_names: tuple[str, ...]
    """[o] Kinds of operators."""

    ops: NDArray[np.int64]
    """[n, layers] Operator of each layer, index into `op_names`."""

    settings: tuple[str, ...]
    """[s] Device and batch size, such as titan_rtx_64."""

    latency_s: NDArray[np.float64]
    """[s, n] Seconds, above 0."""

    def __post_init__(self) -> None:
        """Check shapes and values; raises `InputError`."""
        shape = (len(self.settings), len(self.ops))
        if self.ops.ndim != 2 or self.latency_s.shape != shape:
            raise InputError(
                f"latencies have shape {self.latency_s.shape}, operators {self.ops.shape}; they must be [settings, "
                f"architectures] = {shape} and [architectures, layers]. Correct the file."
            )
        if shape[1] < 2:
            raise InputError(f"{shape[1]} architectures are too few; at least 2 are needed. Measure more.")
        if self.ops.shape[1] == 0:
            raise InputError("the architectures have no operators; each needs at least one. Correct `ops`.")
        if len(set(self.settings)) < len(self.settings):
            raise InputError("a setting appears twice in `settings`; give each row a name of its own.")
        if len(set(self.op_names)) < len(self.op_names):
            raise InputError("an operator appears twice in `op_names`; all settings must mean the same one by a name.")
        unknown = np.argwhere((self.ops < 0) | (self.ops >= len(self.op_names)))
        if len(unknown):
            row, layer = map(int, unknown[0])
            raise InputError(
                f"architecture {row}, layer {layer} has unknown operator {self.ops[row, layer]}; `op_names` lists "
                f"{len(self.op_names)}. Correct `ops`, or name the operator."
            )
        wrong = np.argwhere(~(np.isfinite(self.latency_s) & (self.latency_s > 0)))
        if len(wrong):
            row, sample = map(int, wrong[0])
            raise InputError(
                f"the latency of architecture {sample} on {self.settings[row]} is {self.latency_s[row, sample]} s; it "
                f"must be above 0. Remove or repeat that measurement ({len(wrong)} of them)."
            )

    @classmethod
    def read(cls, path: str | Path) -> LatencyTable:
        """Read an NPZ file with `ops`, `op_names`, `settings` and `latency_ms`; raises `FormatError`."""
        arrays = read_arrays(path, FIELDS)
        try:
            ops, latency = arrays[0].astype(np.int64), arrays[3].astype(np.float64)
            names, settings = (tuple(map(str, each.ravel())) for each in arrays[1:3])
        except (ValueError, TypeError) as error:
            raise FormatError(f"{path} holds other values than numbers: {error}. Write it with numpy.savez.") from error
        return cls(names, ops, settings, latency / 1e3)

    def rows(self, settings: Sequence[str]) -> NDArray[np.float64]:
        """Return [len(settings), n] seconds of these settings; raises `UnknownNameError`."""
        index = {name: place for place, name in enumerate(self.settings)}
        return self.latency_s[[pick(index, name, "setting") for name in settings]]

    def one_hot(self) -> NDArray[np.float64]:
        """Return [n, layers * o]: 1 where a layer has that operator."""
        return np.eye(len(self.op_names))[self.ops].reshape(len(self.ops), -1)
