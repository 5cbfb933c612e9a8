"""A tiny fixed model, trained for a few steps on every rank of a host: do all devices compute the same bits?

A device or a core that computes wrongly, and says nothing, is found by what it computes: the same program on the same
numbers must end in the same bits (ByteRobust, section 4.3, MiniGPT verification). The model is one attention
block; no number is drawn, and each rank runs in a process of its own: on its device, or pinned to its core. That
devices of different models differ is no fault; neither is one that is found here by luck alone: run it more than once.

>>> verdict({0: "a", 1: "a", 2: "b"}), verdict({0: "a", 1: "b"})
([2], [0, 1])
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from headway.core.errors import InputError
from headway.runtime.host.rank_env import num_devices, num_processes
from headway.storage.digests import checksum

STEPS, WIDTH, TOKENS = 8, 64, 48

MODULE = "headway.fault.torch_self_check"


@dataclass(frozen=True, slots=True)
class SelfCheckResult:
    """What a check of a host found."""

    digests: Mapping[int, str]
    """Rank -> the digest of its parameters at the end."""

    failed: Mapping[int, str]
    """Rank -> why it has none."""

    seconds: float
    """How long it took."""

    @property
    def odd(self) -> list[int]:
        """The ranks that failed or differ from most; all of them where no digest is that of more than half."""
        return sorted({*self.failed, *verdict(self.digests)})


def verdict(digests: Mapping[int, str]) -> list[int]:
    """Return the ranks whose digest is not that of more than half; all where there is no such digest."""
    if not digests:
        return []
    common, count = Counter(digests.values()).most_common(1)[0]
    return sorted(rank for rank, one in digests.items() if one != common or 2 * count <= len(digests))


def check(nproc_per_node: int | str | None, *, timeout_s: float) -> SelfCheckResult:
    """Run the model on each rank of this host, all at once; what has not answered after `timeout_s` has failed.

    Raises `InputError` on a number of ranks or a timeout that cannot be.
    """
    if not timeout_s > 0:
        raise InputError(f"--timeout-s is {timeout_s}; it is seconds, above 0. Pass 60.")
    devices = num_devices()
    world = num_processes(nproc_per_node if nproc_per_node is not None else devices or 2)
    begin = time.monotonic()
    env = {**os.environ, "HEADWAY": "off", "OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", MODULE, str(rank), f"cuda:{rank % devices}" if devices else "cpu"],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    digests, failed = {}, {}
    try:
        for rank, process in enumerate(ranks):
            try:
                out, error = process.communicate(timeout=max(begin + timeout_s - time.monotonic(), 0.01))
            except subprocess.TimeoutExpired:
                failed[rank] = f"no answer within {timeout_s:g} s"
                continue
            if process.returncode:
                failed[rank] = (error.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
            else:
                digests[rank] = out.strip()
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
    for process in ranks:  # one in uninterruptible sleep does not even die: it is left to the kernel
        with suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
    return SelfCheckResult(digests, failed, time.monotonic() - begin)


def train(device: str) -> str:
    """Train the model on a device, and return the digest of its parameters."""
    import torch

    def numbers(*shape: int, phase: int) -> torch.Tensor:
        """Return fixed numbers between -0.5 and 0.5, exact in float32."""
        count = torch.Size(shape).numel()
        values = (torch.arange(count, dtype=torch.int64) * 7919 + 104729 * phase) % 1024
        return ((values.float() - 512) / 1024).reshape(shape).to(device)

    weights = [numbers(WIDTH, WIDTH, phase=phase).div_(8).requires_grad_() for phase in range(6)]
    tokens, wanted = numbers(4, TOKENS, WIDTH, phase=11), numbers(4, TOKENS, WIDTH, phase=13)
    for _ in range(STEPS):
        query, key, value = (tokens @ weight for weight in weights[:3])
        mixed = torch.softmax(query @ key.transpose(1, 2) / WIDTH**0.5, dim=-1) @ value
        hidden = tokens + mixed @ weights[3]
        loss = (torch.tanh(hidden @ weights[4]) @ weights[5] - wanted).square().mean()
        for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
            weight.data -= 0.5 * gradient
    return checksum(b"".join(weight.detach().cpu().numpy().tobytes() for weight in weights))


def main(arguments: Sequence[str]) -> None:
    """Be one rank: print the digest."""
    import torch

    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = False
    rank, device = int(arguments[0]), arguments[1]
    if device == "cpu":
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    sys.stdout.write(train(device))


if __name__ == "__main__":
    main(sys.argv[1:])
