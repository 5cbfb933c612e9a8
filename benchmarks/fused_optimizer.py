"""What fused updates take of torch's loop over tensors on a CPU, by optimizer and size of the tensors.

Claim: every share is inside the range of `headway.cost.fused`, from which `compute.fused_optimizer` is predicted, with
a tenth of tolerance. Peer: the loop, torch's default on a CPU, in the same run, turn and turn about; the parameters
are equal within float tolerance after as many updates of both. One thread, CPU time, medians.
"""

import json
import statistics
import sys
import time

import torch

from headway.cost.fused import fused_share

SIZES = {64: 64, 256: 64, 4096: 64, 65_536: 32, 1_048_576: 8}
"""Numbers in a tensor -> tensors."""

OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {}),
    "Adam": (torch.optim.Adam, {}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "SGD with momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "SGD": (torch.optim.SGD, {}),
}
ROUNDS, TOLERANCE = 7, 0.1


def prepared(kind: type, options: dict, size: int, count: int, fused: bool) -> torch.optim.Optimizer:
    """Return an optimizer of `count` tensors of `size` numbers, with gradients, two updates done."""
    torch.manual_seed(0)
    tensors = [torch.randn(size, requires_grad=True) for _ in range(count)]
    for tensor in tensors:
        tensor.grad = torch.randn(size)
    optimizer = kind(tensors, lr=1e-3, fused=fused or None, **options)
    for _ in range(2):
        optimizer.step()
    return optimizer


def share(kind: type, options: dict, size: int, count: int) -> list[float]:
    """Return fused time / loop time of each round."""
    forms = [prepared(kind, options, size, count, fused) for fused in (True, False)]
    updates = max(3, 1_000_000 // (size * count))
    shares = []
    for _ in range(ROUNDS):
        took_s = []
        for optimizer in forms:
            start = time.thread_time()
            for _ in range(updates):
                optimizer.step()
            took_s.append(time.thread_time() - start)
        shares.append(took_s[0] / took_s[1])
    fused, looped = ([tensor for group in form.param_groups for tensor in group["params"]] for form in forms)
    torch.testing.assert_close(fused, looped)
    return shares


def main() -> int:
    """Measure, print one JSON line, and fail where a share is outside the range that predictions are made from."""
    torch.set_num_threads(1)
    rows = []
    for name, (kind, options) in OPTIMIZERS.items():
        for size, count in SIZES.items():
            shares = share(kind, options, size, count)
            known = fused_share(kind.__name__, has_momentum=bool(options), mean_elements=size)
            middle = statistics.median(shares)
            rows.append({
                "optimizer": name, "elements": size, "tensors": count, "share": round(middle, 3),
                "range": [round(min(shares), 3), round(max(shares), 3)],
                "predicted": None if known is None else list(known),
                "met": known is None or known.low * (1 - TOLERANCE) <= middle <= known.high * (1 + TOLERANCE),
            })  # fmt: skip
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    met = all(row["met"] for row in rows)
    print(json.dumps({
        "bench": "fused_optimizer", "peer": "torch's loop over tensors", "torch": torch.__version__, "rows": rows,
        "claim": "every share within the range that predictions are made from", "met": met,
    }))  # fmt: skip
    return 0 if met else 3


if __name__ == "__main__":
    sys.exit(main())
