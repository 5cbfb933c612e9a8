"""Training on weights one step old: the final loss of a small language model under two_buffer and under 1f1b.

Claim: over three seeds the mean final loss of two_buffer is within 1 % of that of 1f1b, the synchronous peer, with the
same batches and the same first weights (two gloo ranks, Adam, characters of the repository's README and docs). Without
--full one seed.
"""

import json
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.made.pool import RankPool  # noqa: E402 - after the path is set

STEPS, LAST, M, CONTEXT, WIDTH = 600, 100, 2, 32, 64


def losses_of(schedule: str, seed: int) -> list[float]:
    """Train on this rank; return the mean loss of each step, nothing on ranks without the last stage."""
    import torch
    from torch import nn

    import headway.parallel

    class Block(nn.Module):
        """Causal attention and two linear layers, each behind a norm."""

        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
            self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.inner = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Compute on [batch, context, width]."""
            parts = self.mix(self.norms[0](x)).unflatten(-1, (3, 4, WIDTH // 4)).permute(2, 0, 3, 1, 4)
            seen = nn.functional.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
            x = x + self.out(seen.transpose(1, 2).flatten(2))
            return x + self.inner(self.norms[1](x))

    class Start(nn.Module):
        """Characters and places."""

        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(128, WIDTH), nn.Parameter(torch.randn(CONTEXT, WIDTH) * 0.1)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            """Embed."""
            return self.words(ids) + self.places

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = nn.Sequential(Start(), Block(), Block(), nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128)))
    texts = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    ids = torch.tensor([min(ord(c), 127) for path in texts for c in path.read_text()])
    runner = headway.parallel.pipeline(
        model, ids[None, :CONTEXT], num_microbatches=M, schedule=schedule, timeout_s=60,
        loss=lambda logits, target: nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten()),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=5e-4),
    )  # fmt: skip
    draw, found = torch.Generator().manual_seed(seed), []
    for _ in range(STEPS):
        begin = torch.randint(0, len(ids) - CONTEXT - 1, (16,), generator=draw)
        rows = ids[begin[:, None] + torch.arange(CONTEXT + 1)]
        losses = runner.step(rows[:, :-1], rows[:, 1:])
        found += [sum(loss.item() for loss in losses.values()) / M] if losses else []
    return found


def main() -> int:
    """Train six times and print one JSON line."""
    pool, final = RankPool(), {}
    for schedule in ("1f1b", "two_buffer"):
        seeds = range(3 if "--full" in sys.argv else 1)
        runs = [pool.run(losses_of, 2, schedule, seed, timeout_s=200)[1] for seed in seeds]
        final[schedule] = [statistics.mean(losses[-LAST:]) for losses in runs]
        first = statistics.mean(losses[0] for losses in runs)
    means = {schedule: statistics.mean(values) for schedule, values in final.items()}
    apart = means["two_buffer"] / means["1f1b"] - 1
    print(json.dumps({
        "bench": "two_buffer_loss", "first_loss": round(first, 3),
        "final_loss": {schedule: [round(value, 4) for value in values] for schedule, values in final.items()},
        "mean_apart": round(apart, 5), "peer": "1f1b", "claim": "within 1 %", "met": abs(apart) <= 0.01,
    }))  # fmt: skip
    return 0 if abs(apart) <= 0.01 else 3


if __name__ == "__main__":
    sys.exit(main())
