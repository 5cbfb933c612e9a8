"""Rows of different lengths, stored once each: deduplicated jagged features for recommendation models (RecD).

Use it when consecutive examples repeat each other's id lists, as those of one
user session do: preprocess, look up and pool the unique rows, then expand by
index. A feature of a batch is a `Jagged`: row b is
`values[offsets[b]:offsets[b + 1]]`. `dedup` keeps each different row once and
an `inverse` that leads back; `expand` returns the batch bit for bit. Features
that change together can share one inverse (a group).

Numpy only; `lookup` and `to_kjt` need torch. The format is RecD's IKJT (Zhao et al., MLSys 2023).

>>> batch = Jagged.from_rows([[7, 8], [7, 8], [], [7, 8, 9]])
>>> once = dedup(batch)
>>> once.values.tolist(), once.offsets.tolist(), once.inverse.tolist()
([7, 8, 7, 8, 9], [0, 2, 2, 5], [0, 0, 1, 2])
>>> once.expand() == batch
True
"""

from __future__ import annotations

import importlib
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import ArrayLike, NDArray

from headway.core.errors import InputError
from headway.data.sessions import cluster_parquet as cluster_parquet
from headway.runtime.script.draws import drawn, fingerprints, own_generators

Ints = NDArray[np.int64]
Values = NDArray[Any]

PROBE_ROWS, LATER_ROWS = 16, 4
"""Rows of the first batch on which a transform has to show that it is row-pure; rows of each later batch, by sample."""

TORCH_PART = "headway.data.torch_jagged"
"""Where `lookup` and `to_kjt` are: only they need torch."""


@dataclass(frozen=True, slots=True, eq=False)
class Jagged:
    """B rows of different lengths. Raises `InputError` on offsets or weights that do not fit; equality is of bits."""

    values: Values
    """[V, ...] The rows' entries, one row after another."""

    offsets: Ints
    """[B + 1] Row b is `values[offsets[b]:offsets[b + 1]]`; from 0 to V, never falling."""

    weights: Values | None = None
    """[V] One weight per entry, or None."""

    def __post_init__(self) -> None:
        """Bring the arrays into their form and check them once."""
        _check_rows(self)

    @classmethod
    def from_rows(
        cls, rows: Sequence[ArrayLike], weights: Sequence[ArrayLike] | None = None, *, dtype: Any = np.int64
    ) -> Jagged:
        """Return the rows of a list of lists; `weights` are lists of the same lengths, kept as float32."""
        offsets = np.concatenate([[0], np.cumsum([len(np.atleast_1d(row)) for row in rows], dtype=np.int64)])
        values = np.concatenate([np.zeros(0, dtype), *(np.asarray(row, dtype) for row in rows)])
        if weights is None:
            return cls(values, offsets)
        if [len(np.atleast_1d(row)) for row in weights] != np.diff(offsets).tolist():
            raise InputError("weights are lists of other lengths than the rows. Give one weight per entry.")
        flat = np.concatenate([np.zeros(0, np.float32), *(np.asarray(row, np.float32) for row in weights)])
        return cls(values, offsets, flat)

    @staticmethod
    def concat(parts: Sequence[Jagged]) -> Jagged:
        """Return the rows of all `parts`, in order: of one type, all with weights or all without."""
        if not parts or len({(part.values.dtype, part.values.shape[1:], part.weights is None) for part in parts}) > 1:
            raise InputError("parts of different types cannot be joined. Pass at least one; all of one type and shape.")
        lengths = np.concatenate([part.lengths for part in parts])
        weights = None if parts[0].weights is None else np.concatenate([part.weights for part in parts])
        return Jagged(np.concatenate([part.values for part in parts]), _offsets(lengths), weights)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __eq__(self, other: object) -> bool:
        """Tell whether types, rows and weights agree to the bit (NaN equals itself, 0.0 differs from -0.0)."""
        if not isinstance(other, Jagged):
            return NotImplemented
        pairs = ((self.values, other.values), (self.offsets, other.offsets), (self.weights, other.weights))
        return all(_same_bits(left, right) for left, right in pairs)

    __hash__ = None  # type: ignore[assignment]  # arrays have no hash

    @property
    def lengths(self) -> Ints:
        """[B] Entries of each row."""
        return np.diff(self.offsets)

    def row(self, index: int) -> Values:
        """Return one row, a view."""
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    def take(self, rows: ArrayLike) -> Jagged:
        """Return the rows at [n] indices, any number of times each and without padding."""
        index = np.asarray(rows, np.int64)
        if index.size and (index.min() < 0 or index.max() >= len(self)):
            raise InputError(f"a row outside 0 to {len(self) - 1} was asked for. Take rows that exist.")
        # at: the places of all entries of the rows asked for, row after row; their offsets are lengths added up again.
        at = _entries(self.offsets, index)
        weights = None if self.weights is None else self.weights[at]
        return Jagged(self.values[at], _offsets(self.lengths[index]), weights)


@dataclass(frozen=True, slots=True, eq=False)
class DedupJagged:
    """B rows of which U differ: each different row once, and for each of the B which one it is. Raises `InputError`."""

    values: Values
    """[V, ...] Entries of the unique rows."""

    offsets: Ints
    """[U + 1] Unique row u is `values[offsets[u]:offsets[u + 1]]`."""

    inverse: Ints
    """[B] Row b is unique row `inverse[b]`; one array shared by the features of a group."""

    weights: Values | None = None
    """[V] One weight per entry, or None."""

    def __post_init__(self) -> None:
        """Bring the arrays into their form and check them once."""
        _check_rows(self)
        inverse = np.asarray(self.inverse)
        if inverse.ndim != 1 or (inverse.size and inverse.dtype.kind not in "iu"):
            raise InputError(f"inverse has shape {inverse.shape} and type {inverse.dtype}; pass [B] whole numbers.")
        if inverse.size and not 0 <= inverse.min() <= inverse.max() < self.num_unique:
            raise InputError(
                f"inverse points at rows {inverse.min()} to {inverse.max()} of {self.num_unique}. Use 0 to U - 1."
            )
        object.__setattr__(self, "inverse", inverse if inverse.dtype == np.int64 else inverse.astype(np.int64))

    def __len__(self) -> int:
        return len(self.inverse)

    @property
    def num_unique(self) -> int:
        """U, the rows that are stored."""
        return len(self.offsets) - 1

    @property
    def factor(self) -> float:
        """Dedup factor B / U; 1 for an empty batch."""
        return len(self) / self.num_unique if self.num_unique else 1.0

    @property
    def unique(self) -> Jagged:
        """The U unique rows."""
        return Jagged(self.values, self.offsets, self.weights)

    def expand(self) -> Jagged:
        """Return the B rows as they were, bit for bit."""
        return self.unique.take(self.inverse)

    def take(self, rows: ArrayLike) -> DedupJagged:
        """Return the batch's rows at [n] indices; unique rows that nobody needs any more are dropped."""
        asked = np.asarray(rows, np.int64)
        if asked.size and not 0 <= asked.min() <= asked.max() < len(self):
            raise InputError(f"a row outside 0 to {len(self) - 1} was asked for. Take rows that exist.")
        # rows asked for -> unique rows, in the order in which they first appear -> numbered anew from 0.
        wanted = self.inverse[asked]
        first = _first_seen(wanted.tolist())
        kept = self.unique.take(np.fromiter(first, np.int64, len(first)))
        inverse = np.array([first[row] for row in wanted.tolist()], np.int64)
        return DedupJagged(kept.values, kept.offsets, inverse, kept.weights)

    def transform(self, function: Callable[[Jagged], Jagged]) -> DedupJagged:
        """Return the batch after a row-pure `function`, which is applied to the unique rows only.

        Row-pure: the result of a row depends on that row alone. It has to show
        that on a sample of rows of its first batch; one that draws random
        numbers (negative sampling) or looks at other rows raises `InputError`,
        since it would give equal rows of a batch different results. Later
        batches compare a few sampled rows; a function found impure there is
        applied to all rows from that batch on, with one warning.
        """
        # First batch: each sampled row alone must equal itself in company, else the function is refused. Later ones: a
        # few rows; a function that fails there is applied to all rows from then on.
        known = _purity_of(function)
        if known.get(_name(function)) is False:
            return _dedup_group({"": _of_all(function, self)})[""]
        sampled = _sampled(self.unique, LATER_ROWS if known else PROBE_ROWS)
        rows = self.unique.take(sampled)
        alone = _each_alone(function, rows) if known else _check_row_pure(function, rows)
        after = function(self.unique)
        if len(after) != self.num_unique:
            raise InputError(f"{_name(function)} made {len(after)} rows of {self.num_unique}. Return one per row.")
        if len(rows) and alone != after.take(sampled):
            if not known:
                raise InputError(f"{_name(function)} looks at other rows of the batch. Call it on expand() instead.")
            known[_name(function)] = False
            warnings.warn(
                f"{_name(function)} is not row-pure: a row alone and in its batch differ. It is applied to all rows "
                "from here on; repeated rows of earlier batches got one result each. Call it on expand() instead.",
                RuntimeWarning,
                stacklevel=2,
            )
            return _dedup_group({"": _of_all(function, self)})[""]
        known[_name(function)] = True
        return DedupJagged(after.values, after.offsets, self.inverse, after.weights)

    def lookup(self, weight: Any, mode: str = "sum") -> Any:
        """Return [B, D] pooled embeddings of table `weight` [N, D]: looked up once per unique row, then expanded."""
        return importlib.import_module(TORCH_PART).lookup(self, weight, mode)


class DedupBatch(dict[str, DedupJagged]):
    """The features of one batch, each deduplicated: name -> `DedupJagged`."""

    def expand(self) -> dict[str, Jagged]:
        """Return every feature as it was."""
        return {name: feature.expand() for name, feature in self.items()}

    def lookup(self, weights: Mapping[str, Any], mode: str = "sum") -> dict[str, object]:
        """Return each feature's [B, D] pooled embeddings from its table `weights[name]`."""
        missing = sorted(set(self) - set(weights))
        if missing:
            raise InputError(f"there is no embedding table for {', '.join(missing)}. Pass one per feature.")
        return {name: feature.lookup(weights[name], mode) for name, feature in self.items()}

    def to_kjt(self, dedup: bool = True) -> Any:
        """Return TorchRec's KeyedJaggedTensor; see `to_kjt`."""
        return to_kjt(self, dedup=dedup)


def dedup(batch: Any, groups: Iterable[Iterable[str]] | None = None) -> Any:
    """Return a `Jagged` as `DedupJagged`, or a dict of them as `DedupBatch`; unique rows stand as they first appear.

    The features of one of `groups` share one inverse: a row is a repetition
    only if all of them repeat, weights included. Features in no group stand
    for themselves. Under data parallelism call it per rank, on the rank's own batch. Raises `InputError`.
    """
    if isinstance(batch, Jagged):
        return _dedup_group({"": batch})[""]
    if not isinstance(batch, Mapping) or not all(isinstance(rows, Jagged) for rows in batch.values()):
        raise InputError(f"{type(batch).__name__} is no Jagged and no dict of them. Build one: Jagged.from_rows(rows).")
    if len({len(rows) for rows in batch.values()}) > 1:
        sizes = ", ".join(f"{name} {len(rows)}" for name, rows in batch.items())
        raise InputError(f"the features have different numbers of rows: {sizes}. Pass features of one batch.")
    together = [list(group) for group in groups or ()]
    named = [name for group in together for name in group]
    wrong = sorted({name for name in named if name not in batch or named.count(name) > 1})
    if wrong:
        raise InputError(f"groups: {', '.join(wrong)} is no feature, or stands twice. Name each feature once.")
    found: dict[str, DedupJagged] = {}
    for group in [*filter(None, together), *([name] for name in batch if name not in named)]:
        found |= _dedup_group({name: batch[name] for name in group})
    return DedupBatch({name: found[name] for name in batch})


def expand(batch: DedupJagged | Mapping[str, DedupJagged]) -> Any:
    """Return what `dedup` was given, bit for bit."""
    return DedupBatch(batch).expand() if isinstance(batch, Mapping) else batch.expand()


def to_kjt(features: Mapping[str, DedupJagged], dedup: bool = True) -> Any:
    """Return TorchRec's KeyedJaggedTensor: unique rows and inverse indices, or with `dedup=False` the expanded rows.

    Raises `InputError` where TorchRec is not installed, or where features differ in type or in having weights.
    """
    return importlib.import_module(TORCH_PART).to_kjt(features, dedup=dedup)


def _dedup_group(features: Mapping[str, Jagged]) -> dict[str, DedupJagged]:
    """Deduplicate features by one inverse."""
    parts = [part for rows in features.values() for part in _parts(rows)]
    num_rows = len(next(iter(features.values())))
    # rows      A B A C A        first   0 1 3      where each different row stands first
    # inverse   0 1 0 2 0        rows == rows[first][inverse]
    inverse, first = _inverse(_digests(parts, num_rows))
    if not _all_equal(parts, first[inverse]):  # two rows of one hash: then their bytes themselves are the key
        inverse, first = _inverse(list(zip(*([bytes(row) for row in part.rows()] for part in parts), strict=True)))
    found = {}
    for name, rows in features.items():
        kept = rows.take(first)
        found[name] = DedupJagged(kept.values, kept.offsets, inverse, kept.weights)
    return found


@dataclass(frozen=True, slots=True)
class _RowBytes:
    """The bytes that make up one feature's rows: its values or its weights."""

    raw: NDArray[np.uint8]
    """[V, width] The bytes of each entry."""

    offsets: Ints
    """[B + 1]"""

    def rows(self) -> list[memoryview]:
        """Return [B] the bytes of each row."""
        data = self.raw.reshape(-1).data
        # Offsets count entries; the bytes of a row are `width` times as many.
        cuts = (self.offsets * self.raw.shape[1]).tolist()
        return [data[begin:end] for begin, end in itertools.pairwise(cuts)]


def _parts(rows: Jagged) -> list[_RowBytes]:
    """Return values and weights as bytes: both are part of equality."""
    arrays = [rows.values] if rows.weights is None else [rows.values, rows.weights]
    return [_RowBytes(_raw(array), rows.offsets) for array in arrays]


def _raw(array: Values) -> NDArray[np.uint8]:
    """Return [V, width] the bytes of each entry."""
    width = array.dtype.itemsize * int(np.prod(array.shape[1:], dtype=np.int64))
    flat: NDArray[np.uint8] = np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(len(array), width)
    return flat


def _digests(parts: Sequence[_RowBytes], num_rows: int) -> list[Any]:
    """Return [B] a 128-bit hash per row, of every part together."""
    digests = [[xxhash.xxh3_128_digest(row) for row in part.rows()] for part in parts]
    if len(digests) == 1:
        return list(digests[0])
    return [b"".join(row) for row in zip(*digests, strict=True)] if num_rows else []


def _first_seen(keys: Iterable[Any]) -> dict[Any, int]:
    """Return key -> its number in the order of first appearance."""
    found: dict[Any, int] = {}
    for key in keys:
        found.setdefault(key, len(found))
    return found


def _inverse(keys: list[Any]) -> tuple[Ints, Ints]:
    """Return [B] which unique key each is, and [U] the first row that has it."""
    number = _first_seen(keys)
    inverse = np.fromiter((number[key] for key in keys), np.int64, len(keys))
    first = np.full(len(number), len(keys), np.int64)
    np.minimum.at(first, inverse, np.arange(len(keys)))
    return inverse, first


def _all_equal(parts: Sequence[_RowBytes], model: Ints) -> bool:
    """Tell whether each row b has the lengths and bytes of row `model[b]`."""
    rows = np.flatnonzero(model != np.arange(len(model)))
    for part in parts:
        lengths = np.diff(part.offsets)
        if not np.array_equal(lengths[rows], lengths[model[rows]]):
            return False
        left, right = _entries(part.offsets, rows), _entries(part.offsets, model[rows])
        if not np.array_equal(part.raw[left], part.raw[right]):
            return False
    return True


def _entries(offsets: Ints, rows: Ints) -> Ints:
    """Return where the entries of `rows` stand, row after row."""
    lengths = np.diff(offsets)[rows]
    ends = np.cumsum(lengths)
    at: Ints = np.arange(ends[-1] if ends.size else 0) + np.repeat(offsets[rows] - (ends - lengths), lengths)
    return at


def _offsets(lengths: Ints) -> Ints:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def _same_bits(left: Values | None, right: Values | None) -> bool:
    if left is None or right is None:
        return left is right
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


def _check_rows(rows: Jagged | DedupJagged) -> None:
    """Check values, offsets and weights against each other, and keep offsets as int64."""
    values, offsets = np.asarray(rows.values), np.asarray(rows.offsets)
    if values.ndim < 1 or values.dtype.hasobject:
        raise InputError(f"values have shape {values.shape} and type {values.dtype}; pass [V] numbers.")
    if offsets.ndim != 1 or not offsets.size or offsets.dtype.kind not in "iu":
        raise InputError(f"offsets have shape {offsets.shape} and type {offsets.dtype}; pass [rows + 1] whole numbers.")
    if offsets[0] != 0 or offsets[-1] != len(values):
        raise InputError(
            f"offsets run from {offsets[0]} to {offsets[-1]}, but there are {len(values)} values. "
            "They must run from 0 to the number of values."
        )
    offsets = offsets.astype(np.int64)
    falls = np.flatnonzero(np.diff(offsets) < 0)
    if falls.size:
        raise InputError(f"offsets fall behind row {falls[0]}. Sort them: a row ends where the next one starts.")
    object.__setattr__(rows, "values", values)
    object.__setattr__(rows, "offsets", offsets)
    if rows.weights is not None:
        weights = np.asarray(rows.weights)
        if weights.shape != (len(values),):
            raise InputError(f"weights have shape {weights.shape} for {len(values)} values. Pass one per value.")
        object.__setattr__(rows, "weights", weights)


_PURITY: weakref.WeakKeyDictionary[Any, dict[str, bool]] = weakref.WeakKeyDictionary()
"""Function, or the object whose method it is -> name -> whether it is row-pure as far as was seen."""


def _purity_of(function: Any) -> dict[str, bool]:
    """Return what is known of a function, to be added to; nothing is remembered of one that cannot be referred to."""
    try:
        return _PURITY.setdefault(getattr(function, "__self__", function), {})
    except TypeError:
        return {}


def _of_all(function: Callable[[Jagged], Jagged], batch: DedupJagged) -> Jagged:
    """Return the result of `function` on all rows of the batch."""
    after = function(batch.expand())
    if len(after) != len(batch):
        raise InputError(f"{_name(function)} made {len(after)} rows of {len(batch)}. Return one per row.")
    return after


def _sampled(rows: Jagged, count: int) -> Ints:
    """Return up to `count` indices of rows, drawn from a seed that every batch has of its own: its values."""
    seed = xxhash.xxh3_64_intdigest(np.ascontiguousarray(rows.values).tobytes())
    return np.sort(np.random.default_rng(seed).permutation(len(rows))[:count]).astype(np.int64)


def _each_alone(function: Callable[[Jagged], Jagged], rows: Jagged) -> Jagged:
    """Return the results of a function that is given one row at a time."""
    return Jagged.concat([function(rows.take([index])) for index in range(len(rows))]) if len(rows) else rows


def _check_row_pure(function: Callable[[Jagged], Jagged], rows: Jagged) -> Jagged:
    """Raise `InputError` unless `function` gives rows the same alone, together and again, and draws nothing.

    Returns what it gives them alone.
    """
    own = own_generators(function)
    before = fingerprints(own)
    together, again = function(rows), function(rows)
    alone = _each_alone(function, rows)
    found = drawn(before, fingerprints(own))
    if found or together != again:
        raise InputError(
            f"{_name(function)} is random{f' (draws from {found[0]})' if found else ''}: repeated rows would all get "
            "the same draw. Call it on expand() instead."
        )
    if len(rows) and alone != together:
        raise InputError(f"{_name(function)} looks at other rows of the batch. Call it on expand() instead.")
    return alone


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
