"""Small models with the parameter names of Hugging Face's, and of torch's encoder, to grow in tests."""

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


class Scaled(GPT2):
    """Its logits depend on its width, which no parameter shows."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) / self.lm_head.in_features


class Paired(GPT2):
    """It takes two inputs."""

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * mask


class Llama(nn.Module):
    def __init__(self, width: int, layers: int, heads: int, kv: int, hidden: int, tied: bool = False, size: int = 8,
                 eps: float = 1e-5) -> None:  # fmt: skip
        super().__init__()
        self.config, self.size = {"num_attention_heads": heads}, size

        def linear(outputs: int, inputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False)

        self.model = named(
            embed_tokens=nn.Embedding(17, width), norm=LlamaRMSNorm(width, eps),
            layers=nn.ModuleList(named(
                input_layernorm=LlamaRMSNorm(width, eps), self_attn__q_proj=linear(heads * size, width),
                self_attn__k_proj=linear(kv * size, width), self_attn__v_proj=linear(kv * size, width),
                self_attn__o_proj=linear(width, heads * size), post_attention_layernorm=LlamaRMSNorm(width, eps),
                mlp__gate_proj=linear(hidden, width), mlp__up_proj=linear(hidden, width),
                mlp__down_proj=linear(width, hidden),
            ) for _ in range(layers)),
        )  # fmt: skip
        self.lm_head = linear(17, width)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        top: Any = self.model
        x = top.embed_tokens(ids)
        for block in top.layers:
            y, a = block.input_layernorm(x), block.self_attn
            x = x + a.o_proj(attend(a.q_proj(y), a.k_proj(y), a.v_proj(y), self.size, True))
            y, m = block.post_attention_layernorm(x), block.mlp
            x = x + m.down_proj(F.silu(m.gate_proj(y)) * m.up_proj(y))
        return self.lm_head(top.norm(x))


class NeoX(nn.Module):
    """Query, key and value of a head lie side by side; both halves of a layer read the same stream."""

    def __init__(self, width: int, layers: int, heads: int, hidden: int, size: int = 8) -> None:
        super().__init__()
        self.config, self.heads = {"num_attention_heads": heads}, heads
        self.gpt_neox = named(
            embed_in=nn.Embedding(17, width), final_layer_norm=nn.LayerNorm(width), layers=nn.ModuleList(named(
                input_layernorm=nn.LayerNorm(width), post_attention_layernorm=nn.LayerNorm(width),
                attention__query_key_value=nn.Linear(width, 3 * heads * size),
                attention__dense=nn.Linear(heads * size, width), mlp__dense_h_to_4h=nn.Linear(width, hidden),
                mlp__dense_4h_to_h=nn.Linear(hidden, width),
            ) for _ in range(layers)),
        )  # fmt: skip
        self.embed_out = nn.Linear(width, 17, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        top: Any = self.gpt_neox
        x = top.embed_in(ids)
        for block in top.layers:
            parts = block.attention.query_key_value(block.input_layernorm(x)).unflatten(-1, (self.heads, -1))
            q, k, v = (part.flatten(2) for part in parts.chunk(3, -1))
            y = block.attention.dense(attend(q, k, v, q.shape[-1] // self.heads, True))
            x = x + y + block.mlp.dense_4h_to_h(F.gelu(block.mlp.dense_h_to_4h(block.post_attention_layernorm(x))))
        return self.embed_out(top.final_layer_norm(x))


def encoder_layer(width: int, heads: int, hidden: int, attention: str, norms: tuple[str, str], size: int) -> nn.Module:
    return named(**{
        f"attention__{attention}__query": nn.Linear(width, heads * size),
        f"attention__{attention}__key": nn.Linear(width, heads * size),
        f"attention__{attention}__value": nn.Linear(width, heads * size),
        "attention__output__dense": nn.Linear(heads * size, width), norms[0]: nn.LayerNorm(width),
        "intermediate__dense": nn.Linear(width, hidden), "output__dense": nn.Linear(hidden, width),
        norms[1]: nn.LayerNorm(width),
    })  # fmt: skip


class Bert(nn.Module):
    """Norms after the addition, a pooler and a tied masked-language head."""

    def __init__(self, width: int, layers: int, heads: int, hidden: int, size: int = 8) -> None:
        super().__init__()
        self.config, self.size = {"num_attention_heads": heads}, size
        norms = ("attention__output__LayerNorm", "output__LayerNorm")
        self.bert = named(
            embeddings__word_embeddings=nn.Embedding(17, width), embeddings__LayerNorm=nn.LayerNorm(width),
            embeddings__position_embeddings=nn.Embedding(12, width), pooler__dense=nn.Linear(width, width),
            embeddings__token_type_embeddings=nn.Embedding(2, width), encoder__layer=nn.ModuleList(
                encoder_layer(width, heads, hidden, "self", norms, size) for _ in range(layers)
            ),
        )  # fmt: skip
        self.cls = named(
            predictions__transform__dense=nn.Linear(width, width), predictions__decoder=nn.Linear(width, 17),
            predictions__transform__LayerNorm=nn.LayerNorm(width),
        )  # fmt: skip
        self.classifier = nn.Linear(width, 3)
        top: Any = self
        top.cls.predictions.decoder.weight = top.bert.embeddings.word_embeddings.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        e, bert, cls = self.bert.embeddings, self.bert, self.cls.predictions
        x = e.word_embeddings(ids) + e.position_embeddings.weight[: ids.shape[1]] + e.token_type_embeddings.weight[0]
        x = e.LayerNorm(x)
        for block in bert.encoder.layer:
            a = block.attention.self
            y = block.attention.output.dense(attend(a.query(x), a.key(x), a.value(x), self.size, False))
            x = block.attention.output.LayerNorm(x + y)
            x = block.output.LayerNorm(x + block.output.dense(F.gelu(block.intermediate.dense(x))))
        words = cls.decoder(cls.transform.LayerNorm(F.gelu(cls.transform.dense(x))))
        return torch.cat([words.flatten(1), self.classifier(bert.pooler.dense(x[:, 0]).tanh())], 1)


class ViT(nn.Module):
    def __init__(self, width: int, layers: int, heads: int, hidden: int, size: int = 8) -> None:
        super().__init__()
        self.config, self.size = {"num_attention_heads": heads}, size
        norms = ("layernorm_before", "layernorm_after")
        self.vit = named(
            embeddings__patch_embeddings__projection=nn.Conv2d(3, width, 4, 4),
            encoder__layer=nn.ModuleList(
                encoder_layer(width, heads, hidden, "attention", norms, size) for _ in range(layers)
            ),
            layernorm=nn.LayerNorm(width),
        )
        top: Any = self.vit
        top.embeddings.cls_token = nn.Parameter(torch.randn(1, 1, width))
        top.embeddings.position_embeddings = nn.Parameter(torch.randn(1, 5, width))
        self.classifier = nn.Linear(width, 3)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        e: Any = self.vit.embeddings
        x = e.patch_embeddings.projection(image).flatten(2).transpose(1, 2)
        x = torch.cat([e.cls_token.expand(len(x), -1, -1), x], 1) + e.position_embeddings
        for block in self.vit.encoder.layer:
            y, a = block.layernorm_before(x), block.attention.attention
            x = x + block.attention.output.dense(attend(a.query(y), a.key(y), a.value(y), self.size, False))
            x = x + block.output.dense(F.gelu(block.intermediate.dense(block.layernorm_after(x))))
        return self.classifier(self.vit.layernorm(x)[:, 0])


class Encoder(nn.Module):
    """torch's own encoder, between an embedding and a head."""

    def __init__(
        self,
        width: int,
        layers: int,
        heads: int,
        hidden: int,
        first: bool = True,
        final: bool = True,
        features: int = 0,
    ) -> None:
        super().__init__()
        self.embedding: nn.Module = nn.Linear(features, width) if features else nn.Embedding(17, width)
        self.position = nn.Parameter(torch.randn(12, width))
        layer = nn.TransformerEncoderLayer(width, heads, hidden, batch_first=True, norm_first=first)
        norm = nn.LayerNorm(width) if final else None
        self.encoder = nn.TransformerEncoder(layer, layers, norm, enable_nested_tensor=False)
        self.head = nn.Linear(width, 17)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(ids) + self.position[: ids.shape[1]]))
