"""CPU time to move a batch to another process: our ring of shared slots against torch's queue and a pipe.

Claim (T1): one batch of 4.8 MB of uint8 costs at most 0.1x the CPU of torch.multiprocessing.Queue and at most 0.35x
that of multiprocessing.Pipe, both processes together. Each way starts from a batch in the producer's memory: the ring
copies it into a slot, the pipe sends its bytes, the queue gets a fresh tensor of it (it moves a tensor's memory, so the
producer needs a new one each time). The consumer reads one byte per page of every batch; the first batch of each
round is compared whole, outside the measurement. One pair of processes, rounds interleaved.
"""

import json
import statistics
import sys

import torch

from headway.data.stalls.torch_costs import BATCH_BYTES, transport_costs

ROUNDS = 9


def main() -> int:
    """Measure the three ways in interleaved rounds; `--full` takes four times as many."""
    torch.set_num_threads(1)
    rounds = ROUNDS * (4 if "--full" in sys.argv[1:] else 1)
    figures = transport_costs(rounds)
    to_queue = sorted(ring / other for ring, other in zip(figures["ring"], figures["queue"], strict=True))
    to_pipe = sorted(ring / other for ring, other in zip(figures["ring"], figures["pipe"], strict=True))
    answer = {
        "bench": "ring_transport", "baseline": f"torch {torch.__version__} Queue, multiprocessing.Pipe",
        "batch_bytes": BATCH_BYTES, "rounds": rounds,
        **{f"{name}_cpu_ms": round(1000 * statistics.median(found), 3) for name, found in figures.items()},
        "ratio": round(statistics.median(to_queue), 3), "ratio_range": [round(to_queue[0], 3), round(to_queue[-1], 3)],
        "to_pipe": round(statistics.median(to_pipe), 3), "to_pipe_range": [round(to_pipe[0], 3), round(to_pipe[-1], 3)],
        "claim": "<=0.1 of the queue, <=0.35 of the pipe",
        "met": statistics.median(to_queue) <= 0.1 and statistics.median(to_pipe) <= 0.35,
    }  # fmt: skip
    print(json.dumps(answer))
    return 0 if answer["met"] else 3


if __name__ == "__main__":
    sys.exit(main())
