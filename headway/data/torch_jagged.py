"""Deduplicated jagged features in torch: look up and pool the unique rows, expand the result, hand over to TorchRec.

Pooled embeddings are bit-equal to those of the expanded batch: a row's result
depends on that row alone. Gradients differ in the last bits, since those of
repeated rows are summed first. Tensors of ids are made on the device of the
embedding table.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name that every torch program gives it

from headway.core.errors import InputError
from headway.core.tables import pick
from headway.data.jagged import DedupJagged, Jagged

MODES: dict[str, str] = {
    "sum": "the sum of a row's embeddings, each times its weight if there are weights",
    "mean": "their mean",
    "max": "their largest, entry by entry",
}
"""Pooling of a row's embeddings; an empty row gives zeros."""


def lookup(rows: DedupJagged | Jagged, weight: torch.Tensor, mode: str = "sum") -> torch.Tensor:
    """Return [B, D] pooled embeddings of table `weight` [N, D], one lookup per unique row. Raises `InputError`."""
    pick(MODES, mode, "mode")
    if weight.ndim != 2:
        raise InputError(f"the embedding table has shape {tuple(weight.shape)}; pass [N, D].")
    if rows.values.ndim != 1 or rows.values.dtype.kind not in "iu":
        raise InputError(f"values have shape {rows.values.shape} and type {rows.values.dtype}; a lookup takes [V] ids.")
    if len(rows.values) and not 0 <= rows.values.min() <= rows.values.max() < len(weight):
        raise InputError(
            f"ids go from {rows.values.min()} to {rows.values.max()}, but the table has rows 0 to {len(weight) - 1}. "
            "Use a larger table, or hash the ids."
        )
    if rows.weights is not None and mode != "sum":
        raise InputError(f"weights have a meaning under mode 'sum' only, not {mode!r}. Drop the weights or the mode.")

    def pooled(values: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        entry = None if weights is None else weights.to(weight.dtype)
        return F.embedding_bag(
            values.long(), weight, offsets, mode=mode, per_sample_weights=entry, include_last_offset=True
        )

    return on_unique(rows, pooled, device=weight.device)


def on_unique(
    rows: DedupJagged | Jagged,
    function: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor],
    *,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Return [B, ...]: `function(values [V], offsets [U + 1], weights)` -> [U, ...] on unique rows, then expanded.

    `function` is the tower of a sequence feature, an attention or pooling: it
    must treat rows apart from each other (no batch normalisation), or unique rows give another result than all.
    """
    weights = None if rows.weights is None else tensor(rows.weights, device)
    result = function(_ids(rows.values, device), tensor(rows.offsets, device), weights)
    num_rows = len(rows.offsets) - 1
    if len(result) != num_rows:
        raise InputError(f"the function made {len(result)} results of {num_rows} rows. Return one per row.")
    return result.index_select(0, tensor(rows.inverse, device)) if isinstance(rows, DedupJagged) else result


def to_kjt(features: Mapping[str, DedupJagged], *, dedup: bool = True) -> Any:
    """Return TorchRec's KeyedJaggedTensor of the features; raises `InputError` where TorchRec is not installed."""
    arguments = kjt_arguments(features, dedup=dedup)
    try:
        module = importlib.import_module("torchrec.sparse.jagged_tensor")
    except ImportError as error:
        raise InputError(
            f"TorchRec cannot be imported ({error}). Install torchrec, or use kjt_arguments() for its arguments."
        ) from error
    return module.KeyedJaggedTensor(**arguments)


def kjt_arguments(features: Mapping[str, DedupJagged], *, dedup: bool = True) -> dict[str, object]:
    """Return the arguments of TorchRec's KeyedJaggedTensor.

    With `dedup`, feature f has its own number of rows U_f
    (`stride_per_key_per_rank`), and `inverse_indices` = (names, [F, B]) leads
    back; without it, all have B rows. Raises `InputError` on features of
    different batches or types, or of which only some have weights.
    """
    if not features:
        raise InputError("there are no features. Pass at least one.")
    if len({len(rows) for rows in features.values()}) > 1:
        raise InputError("the features have different numbers of rows. Pass features of one batch.")
    kinds = {(str(rows.values.dtype), rows.values.ndim, rows.weights is None) for rows in features.values()}
    if len(kinds) > 1:
        raise InputError("the features differ in type, or only some have weights. Convert them to one type first.")
    parts: list[Jagged] = [rows.unique if dedup else rows.expand() for rows in features.values()]
    joined = Jagged.concat(parts)
    arguments: dict[str, Any] = {
        "keys": list(features),
        "values": _ids(joined.values, "cpu"),
        "weights": None if joined.weights is None else tensor(joined.weights, "cpu"),
        "lengths": tensor(joined.lengths.astype(np.int32), "cpu"),
    }
    if dedup:
        arguments["stride_per_key_per_rank"] = [[len(part)] for part in parts]
        inverse = np.stack([rows.inverse for rows in features.values()])
        arguments["inverse_indices"] = (list(features), tensor(inverse, "cpu"))
    return arguments


def tensor(array: np.ndarray[Any, Any], device: torch.device | str) -> torch.Tensor:
    """Return an array as a tensor on `device`; on a CPU they share memory where that is allowed."""
    return torch.from_numpy(array if array.flags.writeable else array.copy()).to(device)


def _ids(values: np.ndarray[Any, Any], device: torch.device | str) -> torch.Tensor:
    """Return values as a tensor; ids of a type that embeddings do not take become int64."""
    wide = values.dtype.kind in "iu" and values.dtype not in (np.dtype(np.int32), np.dtype(np.int64))
    return tensor(values.astype(np.int64) if wide else values, device)
