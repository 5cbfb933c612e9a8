"""Erasure coding: encode at least as fast as pyeclib's best backend (ISA-L), and every erasure undone exactly.

Claim: RS.encode is at least as fast as pyeclib's fastest backend on 4+2, 6+3, 8+2 and 10+4, on stripes of 1 and 16 MiB
of data, in CPU time of one thread, each side through its ordinary call that returns new memory; a side is judged by its
cheapest rounds. Decoding with m losses stands beside it. Both must return the same data from the same erasures. Then
erasure patterns of all codes of up to 14 members: a tenth, `--full` every one.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from _command import ROOT
from _noise import cheapest

sys.path.insert(0, str(ROOT))

from pyeclib.ec_iface import ECDriver

from headway.storage.redundancy.erasure import RS
from tests.codes import shapes, survivors

SHAPES = [(4, 2), (6, 3), (8, 2), (10, 4)]
SIZES = [1 << 20, 1 << 24]
BACKENDS = ["isa_l_rs_vand", "isa_l_rs_cauchy", "isa_l_rs_vand_inv", "liberasurecode_rs_vand"]
ROUND_BYTES, WARM_UP, MAX_MEMBERS = 1 << 27, 8, 14


def cpu_s(work: Callable[[], Any]) -> float:
    """Return the CPU seconds of one call, after one that brings its data into the caches."""
    work()
    begin = time.thread_time()
    work()
    return time.thread_time() - begin


def compared(k: int, m: int, num_bytes: int) -> dict[str, Any]:
    """Return encode and decode ratios (peer's CPU over ours, > 1: ours is faster) of one shape and size."""
    data = np.random.default_rng(k).integers(0, 256, (k, num_bytes // k), dtype=np.uint8)
    raw, ours = data.tobytes(), RS(k, m)
    peers = {name: ECDriver(k=k, m=m, ec_type=name) for name in BACKENDS}
    members = dict(enumerate([*data, *ours.encode(data)]))
    kept = {number: members[number] for number in range(m, k + m)}
    fragments = {name: peer.encode(raw)[m:] for name, peer in peers.items()}
    assert all(peer.decode(fragments[name]) == raw for name, peer in peers.items()), "a peer's answer is wrong"
    assert (ours.decode(kept) == data).all(), "our answer is wrong"
    sides: dict[str, list[Callable[[], Any]]] = {name: [
        lambda peer=peer: peer.encode(raw), lambda peer=peer, name=name: peer.decode(fragments[name])
    ] for name, peer in peers.items()}  # fmt: skip
    sides["ours"] = [lambda: ours.encode(data), lambda: ours.decode(kept)]
    for works in sides.values():
        for work in works * WARM_UP:
            work()
    rounds = [
        {name: [cpu_s(work) for work in works] for name, works in sides.items()}
        for _ in range(min(40, ROUND_BYTES // num_bytes))
    ]
    answer: dict[str, Any] = {"scheme": f"{k}+{m}", "bytes": num_bytes}
    for index, what in enumerate(("encode", "decode")):
        cost = {name: cheapest([found[name][index] for found in rounds]) for name in sides}
        best = min(BACKENDS, key=lambda name: cost[name])
        ratios = sorted(found[best][index] / found["ours"][index] for found in rounds)
        answer[what] = {
            "ours_gb_s": round(num_bytes / cost["ours"] / 1e9, 2), "peer": best,
            "peer_gb_s": round(num_bytes / cost[best] / 1e9, 2), "ratio": round(cost[best] / cost["ours"], 2),
            "ratio_range": [round(ratios[0], 2), round(ratios[-1], 2)],
        }  # fmt: skip
    return answer


def exact(full: bool) -> int:
    """Undo erasures of every code of up to 14 members, all of m losses with `full`; return how many patterns."""
    tried = 0
    for n in range(2, MAX_MEMBERS + 1):
        for k, m in shapes(n):
            code = RS(k, m)
            data = np.random.default_rng([n, k]).integers(0, 256, (k, 19), dtype=np.uint8)
            members = dict(enumerate([*data, *code.encode(data)]))
            for kept in list(survivors(k, m))[:: 1 if full else 10]:
                lost = [number for number in range(n) if number not in kept]
                made = code.rebuild({number: members[number] for number in kept}, lost)
                assert (made == [members[number] for number in lost]).all(), (k, m, kept)
                tried += 1
            assert (code.decode(members) == data).all()
    return tried


def main() -> int:
    """Measure and print one JSON line."""
    found = [compared(k, m, size) for k, m in SHAPES for size in SIZES]
    ratios = sorted(row["encode"]["ratio"] for row in found)
    tried = exact("--full" in sys.argv)
    met = ratios[0] >= 1
    print(json.dumps({
        "bench": "erasure_speed", "rows": found, "patterns_exact": tried, "seed": "n, k",
        "ratio": statistics.median(ratios), "ratio_range": [ratios[0], ratios[-1]],
        "baseline": "pyeclib 1.8.0, its fastest backend per row", "claim": "encode >= 1x on every row", "met": met,
    }))  # fmt: skip
    return 0 if met else 3


if __name__ == "__main__":
    sys.exit(main())
