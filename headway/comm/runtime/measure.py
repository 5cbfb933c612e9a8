"""What codecs take on this host: `python -m headway.comm.runtime.measure NAME,NAME FILE`, one thread, CPU seconds.

Every codec encodes and decodes normal numbers of four sizes; a row holds the median of some rounds, in which the
codecs take turns. The name `raw` measures passes over memory: adding two tensors, and copying one. CPU time, because
the turns that other processes of the host have now say little of those that they will have beside a training step.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from headway.comm.runtime.codecs.table import codec_of
from headway.cost.codecs import wire_bytes
from headway.runtime.recorder.probes import write_json
from headway.sim.ddp.ddp_compress import RAW

SCHEMA = "headway.comm-bench/1"

SIZES = (4_096, 32_768, 262_144, 1_000_000)
"""Numbers in a tensor; the largest is a partition."""

ROUNDS = 7
BUDGET_S = 15.0
"""No round begins after this, but the first two."""


def measured(names: Sequence[str], *, rounds: int = ROUNDS, budget_s: float = BUDGET_S) -> list[dict[str, Any]]:
    """Return a row per codec and size: codec, numel, encode_s, decode_s, wire_bytes."""
    began = time.monotonic()
    generator = torch.Generator().manual_seed(0)
    tensors = {n: torch.randn(n, generator=generator) for n in SIZES}
    times: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for number in range(rounds):
        if number >= 2 and time.monotonic() - began > budget_s:
            break
        for name in names:
            for n, x in tensors.items():
                pair = _raw(x) if name == RAW else _pair(name, x)
                if number:  # the first round takes fresh memory
                    times.setdefault((name, n), []).append(pair)
    return [
        {
            "codec": name,
            "numel": n,
            "encode_s": median(encode for encode, _ in pairs),
            "decode_s": median(decode for _, decode in pairs),
            "wire_bytes": 4 * n if name == RAW else wire_bytes(name, n),
        }
        for (name, n), pairs in times.items()
    ]


def _pair(name: str, x: torch.Tensor) -> tuple[float, float]:
    codec = codec_of(name)
    encode_s, packet = _timed(lambda: codec.encode(x))
    return encode_s, _timed(lambda: codec.decode(packet, x.numel()))[0]


def _raw(x: torch.Tensor) -> tuple[float, float]:
    other = torch.empty_like(x)
    return _timed(lambda: torch.add(x, other, out=other))[0], _timed(lambda: other.copy_(x))[0]


def _timed(call: Callable[[], torch.Tensor]) -> tuple[float, torch.Tensor]:
    begin = time.thread_time()
    answer = call()
    return max(time.thread_time() - begin, 1e-9), answer


def main() -> None:
    """Measure and write the file."""
    torch.set_num_threads(1)
    names, path = sys.argv[1].split(","), sys.argv[2]
    write_json(path, {"schema": SCHEMA, "rows": measured(names), "path": path})


if __name__ == "__main__":
    main()
