"""A script on the emulated accelerator of tests/accelerator.py, where `torch.cuda._sleep` is work: a cycle is a ns.

python -m benchmarks._pretend_device [--copy-ms X] [--truth PATH] -- benchmarks.jobs.device_sleeps ARGUMENTS
"""

import argparse
import json
import runpy
import sys
from pathlib import Path

from tests.accelerator import Accelerator, install, pretend_cuda


def stand_in(copy_ms: float = 0.0) -> Accelerator:
    """Have this process see one emulated device; a copy there takes `copy_ms`, for which its host waits."""
    import torch

    accelerator = Accelerator(depth=256)  # some twelve steps of jobs/device_sleeps.py
    install(accelerator, forward_ms=0, backward_ms=0, update_ms=0)
    pretend_cuda(accelerator, copy_ms=copy_ms)
    torch.cuda._sleep = accelerator.launch
    torch.cuda.device_count = lambda: 1
    torch._C._cuda_hasPrimaryContext = lambda _: True
    return accelerator


def main() -> None:
    """Run a script, by its path, or a module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--copy-ms", type=float, default=0.0)
    parser.add_argument("--truth", type=Path, help="write the work and the copies of the device to this path")
    parser.add_argument("script", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    accelerator = stand_in(options.copy_ms)
    sys.argv = options.script[1:] if options.script[0] == "--" else options.script
    if sys.argv[0].endswith(".py"):
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    if options.truth is not None:
        options.truth.write_text(json.dumps({"work": accelerator.work}))


if __name__ == "__main__":
    main()
