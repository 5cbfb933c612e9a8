"""What torch's own distributed checkpoint takes to save, measured in a process of its own.

`python -m headway.checkpoint.torch_dcp.stock_save FOLDER BYTES` saves a state of
so many bytes with `dcp.save` into a folder inside FOLDER, a few times, removes
it and prints {"save_s", "num_bytes"} of the fastest. `headway ckpt bench` lays
it beside what the same host does with a copy and a process behind the steps.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict_saver import save

TENSOR_BYTES = 4 << 20
"""Size of a tensor of the state."""

ROUNDS = 3


def fastest_save_s(folder: Path, num_bytes: int) -> float:
    """Return the seconds of the fastest `dcp.save` of `num_bytes` (whole tensors of 4 MiB) into `folder`."""
    state = {f"weight_{index}": torch.rand(TENSOR_BYTES // 4) for index in range(max(1, num_bytes // TENSOR_BYTES))}
    seconds = []
    for _ in range(ROUNDS + 1):
        inner = Path(tempfile.mkdtemp(dir=folder, prefix=".bench-"))
        try:
            start_ns = time.perf_counter_ns()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that there is one process only is what is meant
                save(state, checkpoint_id=inner / "dcp", no_dist=True)
            seconds.append((time.perf_counter_ns() - start_ns) / 1e9)
        finally:
            shutil.rmtree(inner, ignore_errors=True)
    return min(seconds[1:])


def main() -> None:
    """Measure as the arguments say, and print one JSON object."""
    folder, num_bytes = Path(sys.argv[1]), int(sys.argv[2])
    rounded = max(1, num_bytes // TENSOR_BYTES) * TENSOR_BYTES
    sys.stdout.write(json.dumps({"save_s": fastest_save_s(folder, num_bytes), "num_bytes": rounded}) + "\n")


if __name__ == "__main__":
    main()
