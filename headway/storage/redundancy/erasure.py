"""Erasure codes: k members of data and m of parity, any k of which give everything back.

A systematic Cauchy Reed-Solomon code in bits: parity packets are XORs of data
packets (Bloemer et al. 1995), whose common parts are computed once. Members
are uint8 arrays of one length L, of any length. Each is cut into cells of
`cell_bytes` (4 KiB) that are coded apart: whatever is damaged inside a cell
concerns that cell alone. A cell is `w` packets; the last cell may be short.
One parity is plain XOR.

Arrays are numpy's or torch's, on any device. All work on them is
`xp.bitwise_xor(a, b, out=c)` and slicing, which both modules have; `xp` is
imported by its name when a code is made, so that no torch is imported by this
file. Host memory in quantity runs through machine code (`xor_program`).

>>> code = RS(4, 2)
>>> data = np.arange(40, dtype=np.uint8).reshape(4, 10)
>>> parity = code.encode(data)
>>> bool((parity[0] == data[0] ^ data[1] ^ data[2] ^ data[3]).all())
True
>>> bool((code.decode({0: data[0], 2: data[2], 4: parity[0], 5: parity[1]}) == data).all())
True

Which bytes of which ranks protect each other: stripes over the images of a checkpoint.

All images count as long as the longest. Each is cut into k segments, and
stripe t takes one segment of each of k ranks, and m segments of parity that
lie with m further ranks: ranks stand in a circle, stripe t begins at place t,
its parities take places t .. t + m - 1, its data the k places after these.
So there are as many stripes as ranks, every rank holds k data and m parity
segments, and k does not depend on the number of ranks. With k + m ranks or
more a stripe meets no rank twice, and any m rank directories may be lost.

Neighbours in the circle lie in different failure domains as far as there are
any: see `circle`.

>>> stripes = Stripes(k=4, m=2, circle=(0, 1, 2, 3, 4, 5), segment_bytes=4096)
>>> stripes.parity(0), stripes.data(0)
([(0, 0), (1, 1)], [(2, 0), (3, 1), (4, 2), (5, 3)])
>>> stripes.tolerated({rank: rank for rank in range(6)})
2
>>> circle({0: "a", 1: "a", 2: "b", 3: "b"})
(0, 2, 1, 3)
"""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import InputError
from headway.core.tables import pick
from headway.storage.redundancy.xor_program import (
    POLYNOMIALS,
    VECTOR_BYTES,
    Elements,
    Kernel,
    cauchy,
    compiled,
    field,
    in_bits,
    in_terms_of,
    interpret,
    plain,
    product,
    shared,
)

ARRAY_MODULES = {"numpy": "numpy", "torch": "torch"}
"""What `xp` may name -> the module with the arrays."""

CELL_BYTES = 4096
"""Cells of this size match the smallest blocks that have digests."""

WIDTHS = (2, 4, 8)
"""Bits per element, chosen by default: those whose packets divide a cell of 4 KiB."""

COMPILE_FROM_BYTES = 4 << 20
"""A program that has read this much host memory is worth its 30 ms of compilation."""


_Recipe = Callable[[Elements, int], Elements]
"""A code's [m, k] matrix and its w -> coefficients [targets, rows] of what is to be made."""


class RS:
    """A code of `k` data and `m` parity members; members are numbered 0..k-1 (data) and k..k+m-1 (parity).

    `w` is the number of bits per field element: by default the least of 1, 2, 4, 8 that the code needs, k + m <= 2^w.
    `matrix` gives the [m, k] coefficients of a code made earlier (as it is stored beside parity) in place of the
    default ones. Raises `InputError` on numbers that make no code.
    """

    def __init__(
        self,
        k: int,
        m: int,
        w: int | None = None,
        xp: str = "numpy",
        *,
        cell_bytes: int | None = None,
        matrix: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.k, self.m = k, m
        self.w = _width(k, m, w)
        self.cell_bytes = CELL_BYTES - CELL_BYTES % (VECTOR_BYTES * self.w) if cell_bytes is None else cell_bytes
        if self.cell_bytes < self.w or self.cell_bytes % self.w:
            raise InputError(
                f"cell_bytes is {cell_bytes}; with w = {self.w} it must be a multiple of {self.w}. Use 4096."
            )
        self.xp = importlib.import_module(pick(ARRAY_MODULES, xp, "array module"))
        self.matrix: Elements = cauchy(k, m, self.w) if matrix is None else np.array(matrix, np.uint8)
        """[m, k] Coefficients of each parity; row 0 is all ones."""
        if self.matrix.shape != (m, k):
            raise InputError(
                f"the matrix has shape {self.matrix.shape}; a {k}+{m} code takes ({m}, {k}). Pass that one."
            )
        self._works: dict[Hashable, _Work] = {}

    def __repr__(self) -> str:
        return f"RS({self.k}, {self.m}, w={self.w})"

    def encode(self, data: Any, out: Any = None) -> Any:
        """Return the parity u8[m, L] of data u8[k, L] (one array, or k arrays); `out` is filled where it is given."""
        rows = self._members(data, self.k, "data")
        parity = self._target(out, self.m, rows[0])
        self._apply("encode", lambda matrix, w: matrix, rows, parity)
        return parity

    def decode(self, parts: Mapping[int, Any], out: Any = None) -> Any:
        """Return the data u8[k, L] from any k members: number -> u8[L].

        Raises `InputError` when fewer than k are given, naming how many are missing.
        """
        return self.rebuild(parts, range(self.k), out)

    def rebuild(self, parts: Mapping[int, Any], wanted: Sequence[int], out: Any = None) -> Any:
        """Return the members `wanted`, data or parity, u8[len(wanted), L], from any k members; only these are made.

        Members that are both given and wanted are copied.
        """
        self._check_numbers([*parts, *wanted])
        present = sorted(parts)[: self.k]
        if len(present) < self.k:
            raise InputError(
                f"{len(present)} of {self.k + self.m} members are given; a {self.k}+{self.m} code needs {self.k}. "
                f"Find {self.k - len(present)} more, or restore an older checkpoint."
            )
        self._members(list(parts.values()), len(parts), "parts")
        rows = [parts[number] for number in present]
        target = self._target(out, len(wanted), rows[0])
        lost = []
        for place, number in enumerate(wanted):
            if number in parts:
                target[place][...] = parts[number]
            else:
                lost.append(place)
        if lost:
            numbers = [wanted[place] for place in lost]
            made = [target[place] for place in lost]
            self._apply((*present, -1, *numbers), _solving(present, numbers), rows, made)
        return target

    def update(self, parity: Any, i: int, old: Any, new: Any) -> None:
        """Bring `parity` (u8[m, L], in place) up to date after datum `i` changed from `old` to `new` (u8[L]).

        The other data are not read: parity changes by the coefficient times the difference.
        """
        if not 0 <= i < self.k:
            raise InputError(
                f"datum {i} changed; a {self.k}+{self.m} code has data 0 to {self.k - 1}. Name one of these."
            )
        rows = self._members([*parity, old, new], self.m + 2, "parity, old, new")
        difference = self.xp.bitwise_xor(old, new)
        change = self._target(None, self.m, difference)
        self._apply(("update", i), lambda matrix, w: matrix[:, i : i + 1], [difference], change)
        for row, delta in zip(rows[: self.m], change, strict=True):
            self.xp.bitwise_xor(row, delta, out=row)

    def _apply(self, name: Hashable, recipe: _Recipe, rows: Any, targets: Any) -> None:
        """Fill `targets` with what `recipe` makes of `rows`: whole cells, one short cell, and last the odd bytes.

        What was worked out for a recipe is kept by its `name`.
        """
        work = self._works.get(name)
        if work is None:
            work = self._works[name] = _Work(recipe, self)
        length = int(rows[0].shape[0])
        whole, even = length - length % self.cell_bytes, length - length % self.w
        if work.pays(len(rows) * length) and self.xp is np:
            places = np.concatenate([_addresses(rows), _addresses(targets)])
            work.run_native(places, len(rows), whole, self.cell_bytes)
            short = (even - whole) // self.w >= VECTOR_BYTES
            if short:
                work.run_native(places + np.uintp(whole), len(rows), even - whole, even - whole)
            whole = even if short else whole
            spans = [(whole, even, even - whole)]
        else:
            spans = [(0, whole, self.cell_bytes), (whole, even, even - whole)]
        for first, stop, cell_bytes in spans:
            if stop > first:
                work.run([row[first:stop] for row in rows], [row[first:stop] for row in targets], cell_bytes, self.xp)
        if length > even:
            work.run_odd([row[even:] for row in rows], [row[even:] for row in targets])

    def _target(self, out: Any, count: int, like: Any) -> Any:
        """Return `out` once it is checked, or a new [count, L] array beside `like`."""
        shape = (count, int(like.shape[0]))
        if out is None:
            return np.empty(shape, np.uint8) if self.xp is np else like.new_empty(shape)
        self._members(out, count, "out")
        if count:
            self._members([like, out[0]], 2, "out and what it is made of")
        return out

    def _members(self, rows: Any, count: int, what: str) -> Any:
        """Return `rows`: `count` contiguous uint8 [L], one array or several; raise `InputError` naming a wrong one."""
        if len(rows) != count:
            raise InputError(
                f"{what} has {len(rows)} members; this {self.k}+{self.m} code takes {count}. Pass them all."
            )
        kind = np.ndarray if self.xp is np else self.xp.Tensor
        if isinstance(rows, kind) and rows.ndim == 2 and rows.dtype == self.xp.uint8 and _contiguous(rows):
            return rows
        rows = list(rows)
        for number, row in enumerate(rows):
            fits = isinstance(row, kind) and row.dtype == self.xp.uint8 and row.ndim == 1
            if not fits or row.shape != rows[0].shape or not _contiguous(row):
                raise InputError(
                    f"member {number} of {what} is {getattr(row, 'dtype', type(row).__name__)} "
                    f"{list(getattr(row, 'shape', []))}; each must be a contiguous uint8 array of {self.xp.__name__}, "
                    "as long as the first. Pad shorter ones with zeros."
                )
        return rows

    def _check_numbers(self, numbers: Sequence[int]) -> None:
        wrong = [number for number in numbers if not 0 <= number < self.k + self.m]
        if wrong:
            raise InputError(f"member {wrong[0]} of a {self.k}+{self.m} code; give numbers 0 to {self.k + self.m - 1}.")


def _solving(present: Sequence[int], wanted: Sequence[int]) -> _Recipe:
    """Return the recipe of the members `wanted` from k members `present`."""

    def recipe(matrix: Elements, w: int) -> Elements:
        generator = np.vstack([np.eye(matrix.shape[1], dtype=np.uint8), matrix])
        return product(generator[list(wanted)], in_terms_of(matrix, present, w), w)

    return recipe


class _Work:
    """What one recipe of a code comes to: a plain program at once, and machine code of a short one when it pays."""

    def __init__(self, recipe: _Recipe, code: RS) -> None:
        self._recipe, self._shape, self._w = recipe, (code.k, code.m), code.w
        self._bits = in_bits(recipe(code.matrix, code.w), code.w)
        self._program = plain(self._bits)
        self._kernel: Kernel | None = None
        self._odd: list[list[list[int]]] | None = None  # [targets][rows][256] products
        self._done_bytes = 0

    def pays(self, num_bytes: int) -> bool:
        """Say whether machine code is worth its compilation, now that `num_bytes` more are to be read."""
        self._done_bytes += num_bytes
        return self._done_bytes >= COMPILE_FROM_BYTES

    def run(self, rows: list[Any], targets: list[Any], cell_bytes: int, xp: Any) -> None:
        """Make `targets` from `rows`, whole cells, by the interpreter."""
        packet = cell_bytes // self._w
        packets = [
            [row.reshape(-1, self._w, packet)[:, p] for row in side for p in range(self._w)] for side in (rows, targets)
        ]
        interpret(self._program, packets[0], packets[1], xp)

    def run_native(self, places: NDArray[np.uintp], num_rows: int, size: int, cell_bytes: int) -> None:
        """Make `size` bytes, whole cells, of members at the addresses `places`: first those read, then those made."""
        if self._kernel is None:
            self._program = shared(self._bits)
            self._kernel = compiled(self._program)
        packet = cell_bytes // self._w
        starts = np.arange(0, cell_bytes, packet, dtype=np.uintp)
        table: NDArray[np.uintp] = np.add.outer(places, starts).ravel()
        self._kernel.run(
            table, num_rows * self._w, cells=size // cell_bytes, cell_bytes=cell_bytes, packet_bytes=packet
        )

    def run_odd(self, rows: list[Any], targets: list[Any]) -> None:
        """Make fewer than w bytes, which are no packets: elements of GF(2^8), of its code with the same k and m."""
        if self._odd is None:
            self._odd = field(8).multiply[self._recipe(cauchy(*self._shape, 8), 8)].tolist()
        columns = list(zip(*(row.tolist() for row in rows), strict=True))
        for target, tables in zip(targets, self._odd, strict=True):
            for place, column in enumerate(columns):
                total = 0
                for table, value in zip(tables, column, strict=True):
                    total ^= table[value]
                target[place] = total


def _width(k: int, m: int, w: int | None) -> int:
    """Return the bits per field element of a k+m code, the caller's or the least that will do."""
    if k < 1 or m < 1 or k + m > 256:
        raise InputError(f"{k}+{m} is not a valid code; choose k >= 1 data and m >= 1 parities, at most 256 in all.")
    simple = k == 1 or m == 1  # copies or plain XOR: no field is needed
    if w is None:
        return 1 if simple else next(width for width in WIDTHS if k + m <= 1 << width)
    if w not in POLYNOMIALS or not (simple or k + m <= 1 << w):
        raise InputError(f"w is {w}; a {k}+{m} code needs 1 <= w <= 8 and k + m <= 2^w. Leave it away.")
    return w


def _contiguous(row: Any) -> bool:
    return bool(row.flags.c_contiguous if isinstance(row, np.ndarray) else row.is_contiguous())


def _addresses(rows: Any) -> NDArray[np.uintp]:
    """Return where each of some numpy rows begins: of one [n, L] array, or of n arrays."""
    if isinstance(rows, np.ndarray):
        return rows.ctypes.data + np.arange(len(rows), dtype=np.uintp) * np.uintp(rows.strides[0])
    return np.array([row.__array_interface__["data"][0] for row in rows], np.uintp)


MAX_MEMBERS = 16
"""Widest stripe that `+m` makes: a wider one saves little space, and each repair reads k times what was lost."""


@dataclass(frozen=True, slots=True)
class Stripes:
    """How the images of one checkpoint are cut and who holds which parity."""

    k: int
    """Data segments of a stripe, and of an image."""

    m: int
    """Parity segments of a stripe, and of a rank."""

    circle: tuple[int, ...]
    """[world_size] Ranks in the order in which stripes take them."""

    segment_bytes: int
    """Length of a segment: k of them hold the longest image."""

    def data(self, stripe: int) -> list[tuple[int, int]]:
        """Return the [k] data of a stripe: (rank, which segment of its image)."""
        return [(self._at(stripe + self.m + segment), segment) for segment in range(self.k)]

    def parity(self, stripe: int) -> list[tuple[int, int]]:
        """Return the [m] parities of a stripe: (rank, which segment of its parity)."""
        return [(self._at(stripe + slot), slot) for slot in range(self.m)]

    def stripe_of_data(self, rank: int, segment: int) -> int:
        """Return the stripe that a segment of a rank's image belongs to."""
        return (self.circle.index(rank) - self.m - segment) % len(self.circle)

    def stripe_of_parity(self, rank: int, slot: int) -> int:
        """Return the stripe that a segment of a rank's parity belongs to."""
        return (self.circle.index(rank) - slot) % len(self.circle)

    def guardians(self, rank: int, count: int) -> list[int]:
        """Return the `count` ranks after this one in the circle, who keep copies for it; a lone rank keeps its own."""
        place, others = self.circle.index(rank), len(self.circle) - 1
        return [self._at(place + step) for step in range(1, min(count, others) + 1)] or [rank]

    def tolerated(self, domains: Mapping[int, Hashable]) -> int:
        """Return how many domains (rank -> domain) may be lost, whichever they are, with nothing lost for good."""
        return min(self._tolerated(stripe, domains) for stripe in range(len(self.circle)))

    def _tolerated(self, stripe: int, domains: Mapping[int, Hashable]) -> int:
        """Return the same for one stripe: its fullest domains must not hold more than m members between them."""
        held = Counter(domains[rank] for rank, _ in (*self.data(stripe), *self.parity(stripe)))
        left, lost = self.m, 0
        for _, count in held.most_common():
            left -= count
            if left < 0:
                break
            lost += 1
        return lost

    def _at(self, place: int) -> int:
        return self.circle[place % len(self.circle)]


def scheme_of(redundancy: str, world_size: int) -> tuple[int, int] | None:
    """Return (k, m) of `none` (None), `xor` (as `+1`), `+m` (k from the world size) or `k+m`.

    Raises `InputError` on any other text.

    >>> scheme_of("+2", 6), scheme_of("xor", 64), scheme_of("8+2", 2), scheme_of("none", 4)
    ((4, 2), (15, 1), (8, 2), None)
    """
    if redundancy == "none":
        return None
    match = re.fullmatch(r"(\d*)\+(\d+)", "+1" if redundancy == "xor" else redundancy)
    m = int(match[2]) if match else 0
    if match is None or m < 1 or match[1] == "0" or int(match[1] or 1) + m > 256:
        raise InputError(
            f"the redundancy {redundancy!r} is none. Write none, xor, +m (such as +2: any two ranks may be lost) or "
            "k+m (such as 8+2), at most 256 in all."
        )
    return (int(match[1]) if match[1] else max(1, min(world_size, MAX_MEMBERS) - m)), m


def circle(domains: Mapping[int, str]) -> tuple[int, ...]:
    """Return the ranks so that those of one domain stand as far apart as they can.

    `domains` gives each rank's host, or `rack/host`: hosts of one rack stand apart, and ranks of one host.
    """
    return tuple(
        rank for _, rank in _spread([(tuple(path.split("/")), rank) for rank, path in sorted(domains.items())])
    )


def _spread(ranks: list[tuple[tuple[str, ...], int]]) -> list[tuple[tuple[str, ...], int]]:
    """Order (path, rank) so that equal first names are evenly spaced, then the same inside each name."""
    groups: dict[str, list[tuple[tuple[str, ...], int]]] = {}
    for path, rank in ranks:
        groups.setdefault(path[0] if path else "", []).append((path[1:], rank))
    if len(ranks) <= 1 or not any(path for path, _ in ranks):
        return ranks
    # Entry i of n stands at (i + 1/2) / n of the way round: each name is spaced evenly by itself.
    placed = [
        ((index + 0.5) / len(inner), order, entry)
        for order, inner in enumerate(_spread(group) for group in groups.values())
        for index, entry in enumerate(inner)
    ]
    return [entry for _, _, entry in sorted(placed, key=lambda place: place[:2])]
