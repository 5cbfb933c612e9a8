"""Asynchronous checksums and parity of a mapped file against keeping them up at every store: stores per CPU-second.

Claim: with a pass after every 100 ms of writing, a protected region takes at least 3x as many 64-byte stores per
CPU-second, passes included, as the synchronous scheme, which at each store updates parity by the difference and
computes the page's checksum anew. Time is CPU time, and passes are made in turn with the writer. 64 MB on tmpfs,
64-byte slots drawn from a Zipf law (exponent 0.99) and scattered. Both writers are compiled (numba) and store the same
in the same order; the synchronous side's checksum is the inner loop of xxh3 alone, inlined, and costs less than ours.
At the end the contents are equal, and all checksums and parity right.

`rows` has every scheme: `none` (a bare map), `incremental` (a synchronous scheme whose checksum is linear, so that it,
too, follows from the 64 bytes that changed: weaker, and the best that a synchronous scheme can do: its ratio stands in
`ratio_to_incremental`), asynchronous at 20, 100 and 500 ms; and the same for a writer in Python, a slice assignment per
store, with xxh3 and numpy on the synchronous side (`ratio_in_python`). `--full`: four times the rounds.
"""

import json
import math
import mmap
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import xxhash
from _command import ROOT

sys.path.insert(0, str(ROOT))

from _one_f_one_b import cpu_seconds

from headway.core.rng import stream
from headway.storage.regions.protected import ProtectedRegion

NUM_BYTES, SLOT, PAGE, STRIPE = 64 * 2**20, 64, 4096, 4
WORDS, PER_PAGE = SLOT // 8, PAGE // 8
ZIPF, BAR, PERIOD_S = 0.99, 3.0, 0.1
PERIODS_S = (0.02, PERIOD_S, 0.5)
SHM = Path("/dev/shm")
SECONDS = 0.5
"""CPU-seconds of writing per scheme and round: a whole number of the longest period."""
CHUNK = 1 << 15
"""Stores between two looks of the interpreter."""


@numba.njit(nogil=True, cache=True)
def store(data, slots, first):
    """Store 64 bytes per slot; what is stored follows from the number of the store."""
    for i in range(slots.size):
        at = slots[i] * WORDS
        for w in range(WORDS):
            data[at + w] = np.uint64(first + i + 1) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(w)


@numba.njit(nogil=True, cache=True)
def checksum(data, key, page):
    """Return the sum over a page of the products of the halves of its keyed words: xxh3's accumulation, 60 GB/s."""
    total = np.uint64(0)
    words = data[page * PER_PAGE : (page + 1) * PER_PAGE]
    for w in range(PER_PAGE):
        x = words[w] ^ key[w]
        total += (x & np.uint64(0xFFFFFFFF)) * (x >> np.uint64(32))
    return total


@numba.njit(nogil=True, cache=True)
def store_synchronously(data, slots, first, key, table, parity):
    """Store, and bring parity (by the difference) and the page's checksum (anew) up to date each time."""
    for i in range(slots.size):
        at = slots[i] * WORDS
        page = at // PER_PAGE
        across = page // STRIPE * PER_PAGE + at % PER_PAGE
        for w in range(WORDS):
            new = np.uint64(first + i + 1) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(w)
            parity[across + w] ^= data[at + w] ^ new
            data[at + w] = new
        table[page] = checksum(data, key, page)


@numba.njit(nogil=True, cache=True)
def store_incrementally(data, slots, first, key, table, parity):
    """Store, and bring parity and a linear checksum up to date by the difference."""
    for i in range(slots.size):
        at = slots[i] * WORDS
        page = at // PER_PAGE
        across = page // STRIPE * PER_PAGE + at % PER_PAGE
        change = np.uint64(0)
        for w in range(WORDS):
            new = np.uint64(first + i + 1) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(w)
            old = data[at + w]
            change += (new - old) * key[at % PER_PAGE + w]
            parity[across + w] ^= old ^ new
            data[at + w] = new
        table[page] += change


def store_in_python(buf: memoryview, slots: list[int], payload: bytes) -> None:
    """Store one slice at a time."""
    for slot in slots:
        buf[slot * SLOT : slot * SLOT + SLOT] = payload


def store_synchronously_in_python(
    buf: memoryview, slots: list[int], payload: bytes, table: list[int], parity: np.ndarray, words: np.ndarray
) -> None:
    """Store, and bring parity and the page's xxh3 up to date each time."""
    hash_page, new = xxhash.xxh3_64_intdigest, np.frombuffer(payload, np.uint64)
    for slot in slots:
        at, page = slot * SLOT, slot * SLOT // PAGE
        across = (page // STRIPE * PAGE + at % PAGE) // 8
        parity[across : across + WORDS] ^= words[at // 8 : at // 8 + WORDS] ^ new
        buf[at : at + SLOT] = payload
        table[page] = hash_page(buf[page * PAGE : page * PAGE + PAGE])


def zipf_slots(count: int, seed: int) -> np.ndarray:
    """Return `count` slots: ranks of a Zipf law, scattered over the region."""
    rng = stream(seed, "slots")
    weights = np.cumsum(np.arange(1, NUM_BYTES // SLOT + 1, dtype=np.float64) ** -ZIPF)
    ranks = np.searchsorted(weights, rng.random(count) * weights[-1])
    return rng.permutation(NUM_BYTES // SLOT)[ranks].astype(np.int64)


class Synchronous:
    """A bare map with checksums and parity beside it, kept up by the writer."""

    def __init__(self) -> None:
        self.buf = memoryview(mmap.mmap(-1, NUM_BYTES))
        self.data = np.frombuffer(self.buf, np.uint64)
        self.data[:] = 0
        self.key = stream(1, "key").integers(1 << 63, size=PER_PAGE, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
        self.parity = np.zeros(NUM_BYTES // 8 // STRIPE, np.uint64)
        self.table = np.full(NUM_BYTES // PAGE, checksum(self.data, self.key, 0), np.uint64)
        self.linear = np.zeros(NUM_BYTES // PAGE, np.uint64)
        self.xxh3 = [0] * (NUM_BYTES // PAGE)

    def check(self, scheme: str) -> None:
        """Assert that after stores by this scheme alone parity and its checksums are right."""
        pages = self.data.reshape(-1, PER_PAGE)
        across = np.bitwise_xor.reduce(self.data.reshape(-1, STRIPE, PER_PAGE), axis=1).reshape(-1)
        assert np.array_equal(across, self.parity), f"the parity of {scheme} is wrong"
        found = {
            "synchronous": lambda: ([checksum(self.data, self.key, page) for page in range(len(pages))], self.table),
            "incremental": lambda: ((pages * self.key).sum(axis=1, dtype=np.uint64), self.linear),
        }[scheme]()
        assert np.array_equal(np.array(found[0], np.uint64), found[1]), f"the checksums of {scheme} are wrong"


Write = Callable[[Any, int], object]
"""Slots, number of the first store."""


def compiled(side: Synchronous) -> dict[str, Write]:
    """Return the schemes without a region."""
    return {
        "none": lambda slots, first: store(side.data, slots, first),
        "synchronous": lambda slots, first: store_synchronously(
            side.data, slots, first, side.key, side.table, side.parity
        ),
        "incremental": lambda slots, first: store_incrementally(
            side.data, slots, first, side.key, side.linear, side.parity
        ),
    }  # fmt: skip


def in_python(side: Synchronous) -> dict[str, Write]:
    """Return the same for a writer in Python; what is stored changes with each chunk."""
    return {
        "none": lambda slots, first: store_in_python(side.buf, slots, payload(first)),
        "synchronous": lambda slots, first: store_synchronously_in_python(
            side.buf, slots, payload(first), side.xxh3, side.parity, side.data
        ),
    }  # fmt: skip


def payload(number: int) -> bytes:
    """Return 64 bytes to store."""
    return number.to_bytes(8, "little") * WORDS


def agree(slots: np.ndarray, folder: str) -> None:
    """Assert that all schemes leave the same contents, and that each one's redundancy is right in the end."""
    contents = set()
    for scheme in ("none", "synchronous", "incremental"):
        side = Synchronous()
        compiled(side)[scheme](slots, 0)
        if scheme != "none":
            side.check(scheme)
        contents.add(xxhash.xxh3_128_hexdigest(side.data))
    with ProtectedRegion(f"{folder}/agree", num_bytes=NUM_BYTES, period_s=PERIOD_S / 10) as region:
        store(np.frombuffer(region.buf, np.uint64), slots, 0)
        region.update()
        report = region.scrub()
        contents.add(xxhash.xxh3_128_hexdigest(region.buf))
    assert len(contents) == 1, "the schemes differ in what they stored"
    assert (report.status, report.skipped_pages) == ("good", 0), "the region's redundancy is wrong"


def rate(write: Write, slots: Any, update: Callable[[], object] = bool, period_s: float = math.inf) -> float:
    """Write chunk by chunk, with a pass after every `period_s` of writing and a last one; return stores per CPU-second.

    Clocks count CPU of all threads: so other jobs on the machine change neither what a pass meets nor what it costs.
    """
    begin_s, paused_s, done, due_s = time.process_time(), 0.0, 0, period_s
    while (written_s := time.process_time() - begin_s - paused_s) < SECONDS:
        if written_s >= due_s:
            paused_s += cpu_seconds(update)[0]
            due_s += period_s
        at = done % len(slots)
        write(slots[at : at + CHUNK], done)
        done += CHUNK
    update()
    return done / (time.process_time() - begin_s)


def protected(make: Callable[[memoryview], Write], slots: Any, period_s: float, folder: str) -> float:
    """Return the rate into a protected region, its passes included."""
    with ProtectedRegion(f"{folder}/region", num_bytes=NUM_BYTES, period_s=math.inf) as region:
        region.buf[:] = bytes(NUM_BYTES)  # so that, as elsewhere, every page is there before it counts
        region.update()
        write = make(region.buf)
        answer = rate(write, slots, region.update, period_s)
        assert region.scrub().status == "good", "the region's redundancy is wrong"
        del write
    return answer


def compiled_into(buf: memoryview) -> Write:
    """Return the compiled writer into a region."""
    data = np.frombuffer(buf, np.uint64)
    return lambda slots, first: store(data, slots, first)


def python_into(buf: memoryview) -> Write:
    """Return the writer in Python into a region."""
    return lambda slots, first: store_in_python(buf, slots, payload(first))


def round_of(slots: np.ndarray, folder: str, *, python: bool) -> dict[str, float]:
    """Return stores per CPU-second of every scheme, one after the other."""
    side = Synchronous()
    schemes, into = (in_python(side), python_into) if python else (compiled(side), compiled_into)
    some: Any = slots.tolist() if python else slots
    found = {name: rate(write, some) for name, write in schemes.items()}
    for period_s in PERIODS_S:
        found[f"asynchronous, {period_s * 1e3:.0f} ms"] = protected(into, some, period_s, folder)
    return found


def main() -> int:
    """Print one JSON line."""
    rounds = 12 if "--full" in sys.argv else 3
    slots = zipf_slots(CHUNK * 64, 1)
    ours = f"asynchronous, {PERIOD_S * 1e3:.0f} ms"
    with tempfile.TemporaryDirectory(dir=SHM if SHM.is_dir() else None) as folder:
        agree(slots[: 1 << 20], folder)
        fast = [round_of(slots, folder, python=False) for _ in range(rounds)]
        slow = [round_of(slots, folder, python=True) for _ in range(max(1, rounds // 3))]
    ratios = sorted(one[ours] / one["synchronous"] for one in fast)
    met = statistics.median(ratios) >= BAR
    rows = [
        {"writer": writer, "scheme": name, "stores_per_cpu_s": round(statistics.median(one[name] for one in found))}
        for writer, found in (("compiled", fast), ("python", slow))
        for name in found[0]
    ]
    print(json.dumps({
        "bench": "region_async", "region_bytes": NUM_BYTES, "zipf": ZIPF, "period_s": PERIOD_S,
        "baseline": "checksum anew and parity by the difference at each store, compiled",
        "ours_per_cpu_s": round(statistics.median(one[ours] for one in fast)),
        "baseline_per_cpu_s": round(statistics.median(one["synchronous"] for one in fast)),
        "ratio": round(statistics.median(ratios), 2), "ratio_range": [round(ratios[0], 2), round(ratios[-1], 2)],
        "ratio_to_incremental": round(statistics.median(one[ours] / one["incremental"] for one in fast), 2),
        "ratio_in_python": round(statistics.median(one[ours] / one["synchronous"] for one in slow), 2),
        "share_of_unprotected": round(statistics.median(one[ours] / one["none"] for one in fast), 3),
        "claim": f">={BAR}", "met": bool(met), "rows": rows,
    }))  # fmt: skip
    return 0 if met else 3


if __name__ == "__main__":
    sys.exit(main())
