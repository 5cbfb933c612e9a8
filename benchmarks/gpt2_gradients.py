"""Gradients of GPT-2 (12 x 768, from its configuration) over the stages of a pipeline, against the whole model's.

Claim: traced and cut over two gloo ranks, with its embedding and output layer kept one parameter, 1f1b gives every
parameter the gradient of the whole model in float32 (largest difference at most 1e-5 of the largest gradient).
Peer: the whole model in one process. The layers are written out below, by the published configuration.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.made.pool import RankPool  # noqa: E402 - after the path is set

LAYERS, WIDTH, HEADS, VOCABULARY, CONTEXT = 12, 768, 12, 50257, 1024
M, EXAMPLES, TOKENS = 2, 2, 16


def gpt2() -> Any:
    """Return the model, seeded: 124,439,808 parameters."""
    import torch
    from torch import nn

    class Block(nn.Module):
        """Attention and two linear layers, each behind a norm."""

        def __init__(self) -> None:
            super().__init__()
            self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.c_fc, self.c_out = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Compute on [batch, tokens, width]."""
            q, k, v = self.c_attn(self.ln_1(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.c_proj(mixed.transpose(1, 2).flatten(2))
            return x + self.c_out(nn.functional.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))

    class Gpt2(nn.Module):
        """Embeddings, blocks, norm, and the embedding of words again as output layer."""

        def __init__(self) -> None:
            super().__init__()
            self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
            self.h, self.ln_f = nn.ModuleList(Block() for _ in range(LAYERS)), nn.LayerNorm(WIDTH)
            self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
            for parameter in self.parameters():
                nn.init.normal_(parameter, std=0.02)
            self.lm_head.weight = self.wte.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            """Return logits [batch, tokens, vocabulary]."""
            x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
            for block in self.h:
                x = block(x)
            return self.lm_head(self.ln_f(x))

    torch.manual_seed(0)
    return Gpt2()


def differences() -> tuple[int, float, float, list[str]]:
    """Return (parameters, largest gradient, largest difference, tied names) on this rank."""
    import torch

    import headway.parallel

    torch.set_num_threads(1)
    model = gpt2()
    taken: list[torch.nn.Parameter] = []

    def make(parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
        taken.extend(parameters)
        return torch.optim.SGD(parameters, lr=0.0)

    ids = torch.randint(0, VOCABULARY, (M * EXAMPLES, TOKENS), generator=torch.Generator().manual_seed(1))

    def loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), target[:, 1:].flatten())

    for some in ids.chunk(M):
        (loss(model(some), some) / M).backward()
    whole = {name: one.grad.clone() for name, one in model.named_parameters(remove_duplicate=False)}
    model.zero_grad()
    runner = headway.parallel.pipeline(
        model, ids[:EXAMPLES], loss=loss, num_microbatches=M, timeout_s=300, optimizer=make
    )  # fmt: skip
    runner.step(ids, ids)
    state = runner.state_dict()
    names = {value.data_ptr(): name for name, value in state.items()}
    found = {names[parameter.data_ptr()]: parameter.grad for parameter in taken}
    largest = max(float(whole[name].abs().max()) for name in found)
    apart = max(float((value - whole[name]).abs().max()) for name, value in found.items())
    tied = [name for name in state if name in ("wte.weight", "lm_head.weight")]
    return sum(value.numel() for value in found.values()), largest, apart, tied


def main() -> int:
    """Compare and print one JSON line."""
    answers = RankPool().run(differences, 2, timeout_s=400)
    largest, apart = max(answer[1] for answer in answers), max(answer[2] for answer in answers)
    parameters, tied = [answer[0] for answer in answers], [answer[3] for answer in answers]
    assert all(tied), "a rank has no copy of the tied parameter"
    met = apart <= 1e-5 * largest
    print(json.dumps({
        "bench": "gpt2_gradients", "parameters": parameters, "largest_gradient": largest, "largest_difference": apart,
        "tied": tied, "peer": "the whole model in one process", "claim": "<= 1e-5 in float32", "met": met,
    }))  # fmt: skip
    return 0 if met else 3


if __name__ == "__main__":
    sys.exit(main())
