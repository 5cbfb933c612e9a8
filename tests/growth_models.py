"""Small models with the parameter names of Hugging Face's, and of torch's encoder, to grow in tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812


class Conv1D(nn.Module):
    """A linear layer whose weight is stored inputs first."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) * inputs**-0.5)
        self.bias = nn.Parameter(torch.randn(outputs) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


class LlamaRMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)
        self.variance_epsilon = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, size: int, causal: bool) -> torch.Tensor:
    q, k, v = (each.unflatten(-1, (-1, size)).transpose(1, 2) for each in (q, k, v))
    k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)


def named(**parts: nn.Module) -> nn.Module:
    """Return a module that holds others under names, which may be dotted ("attention.self")."""
    top = nn.Module()
    for path, part in parts.items():
        place, keys = top, path.split("__")
        for key in keys[:-1]:
            if not hasattr(place, key):
                place.add_module(key, nn.Module())
            place = getattr(place, key)
        place.add_module(keys[-1], part)
    return top


class GPT2(nn.Module):
    def __init__(self, width: int, layers: int, heads: int, hidden: int, tied: bool = True, eps: float = 1e-5,
                 size: int = 8) -> None:  # fmt: skip
        super().__init__()
        inner = heads * size
        self.config, self.size = {"n_head": heads}, size
        self.transformer = named(
            wte=nn.Embedding(17, width), wpe=nn.Embedding(12, width), ln_f=nn.LayerNorm(width, eps=eps),
            h=nn.ModuleList(named(
                ln_1=nn.LayerNorm(width, eps=eps), attn__c_attn=Conv1D(3 * inner, width),
                attn__c_proj=Conv1D(width, inner), ln_2=nn.LayerNorm(width, eps=eps), mlp__c_fc=Conv1D(hidden, width),
                mlp__c_proj=Conv1D(width, hidden),
            ) for _ in range(layers)),
        )  # fmt: skip
        self.lm_head = nn.Linear(width, 17, bias=False)
        if tied:
            self.lm_head.weight = self.transformer.wte.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        top: Any = self.transformer
        x = top.wte(ids) + top.wpe.weight[: ids.shape[1]]
        for block in top.h:
            x = x + block.attn.c_proj(attend(*block.attn.c_attn(block.ln_1(x)).chunk(3, -1), self.size, True))
            x = x + block.mlp.c_proj(F.gelu(block.mlp.c_fc(block.ln_2(x))))
        return self.lm_head(top.ln_f(x))
