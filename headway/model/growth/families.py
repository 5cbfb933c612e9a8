"""Which part of a transformer each parameter is: one table of roles, a family of models per entry.

A family is a list of rows (pattern, role). A pattern is the end of a parameter's name: `#` stands for a layer's number,
`*` for anything within one part of the name, and any parts that are not numbers may come before. The first row that
matches counts. A role says along which axes a parameter grows, and how. To support another name, add a row:

>>> find(FAMILIES["gpt2"], "transformer.h.11.mlp.c_fc.weight")
ParameterRole(role='read', layer=11)
>>> FAMILIES["mine"] = [("block.#.extra.weight", "read"), *FAMILIES["gpt2"]]
>>> find(FAMILIES["mine"], "block.3.extra.weight")
ParameterRole(role='read', layer=3)
>>> del FAMILIES["mine"]

The axes are those of a linear layer's weight, outputs first; a bias has the first alone. Weights that are stored inputs
first, by modules called `Conv1D`, are turned round by the caller.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from headway.core.errors import InputError
from headway.core.tables import pick, suggestion

ROLES: dict[str, tuple[str, ...]] = {
    "token": ("same", "stream"),  # [vocabulary, width]
    "position": ("...", "stream"),  # [positions, width], class tokens, token types
    "patch": ("stream", "..."),  # a convolution that writes to the residual stream, or any bias added to it
    "query": ("query", "read"),  # whole heads are repeated
    "key": ("kv", "read"),
    "value": ("kv", "read"),
    "qkv": ("qkv", "read"),  # the three of them in one matrix
    "attention output": ("stream", "from_query"),
    "qkv by head": ("qkv by head", "read"),  # in one matrix, query, key and value of a head side by side
    "read": ("hidden", "read"),  # a layer from the stream to hidden units; both of a gated pair, which grow alike
    "write": ("stream", "from_hidden"),  # from hidden units to the stream
    "norm gain": ("gain",),
    "norm bias": ("bias",),
    "final gain": ("gain",),  # of the norm before the head: what a tied head counts too often is divided out here
    "final bias": ("bias",),
    "post gain": ("gain",),  # of a norm after the addition: only multiples of the width are lossless
    "post bias": ("bias",),
    "head": ("same", "read"),  # tied heads are found by their memory
    "same": ("...",),  # independent of the width: masks, frequencies, norms within a head
}
"""Role -> how each axis grows; `...` is any number of axes that stay as they are."""

WRITES = ("attention output", "write")
"""Roles that a new block has zeros, or weights that cancel, in."""

FAMILIES: dict[str, list[tuple[str, str]]] = {
    "gpt2": [
        ("wte.weight", "token"),
        ("wpe.weight", "position"),
        ("h.#.ln_*.weight", "norm gain"),
        ("h.#.ln_*.bias", "norm bias"),
        ("h.#.attn.bias", "same"),  # the mask of older versions
        ("h.#.attn.masked_bias", "same"),
        ("h.#.attn.c_attn.*", "qkv"),
        ("h.#.attn.c_proj.*", "attention output"),
        ("h.#.mlp.c_fc.*", "read"),
        ("h.#.mlp.c_proj.*", "write"),
        ("ln_f.weight", "final gain"),
        ("ln_f.bias", "final bias"),
        ("lm_head.weight", "head"),
        ("score.weight", "head"),
    ],
    "llama": [
        ("embed_tokens.weight", "token"),
        ("layers.#.input_layernorm.weight", "norm gain"),
        ("layers.#.post_attention_layernorm.weight", "norm gain"),
        ("layers.#.self_attn.q_proj.*", "query"),
        ("layers.#.self_attn.k_proj.*", "key"),
        ("layers.#.self_attn.v_proj.*", "value"),
        ("layers.#.self_attn.o_proj.*", "attention output"),
        ("layers.#.self_attn.?_norm.weight", "same"),
        ("layers.#.self_attn.rotary_emb.inv_freq", "same"),
        ("layers.#.mlp.gate_proj.*", "read"),
        ("layers.#.mlp.up_proj.*", "read"),
        ("layers.#.mlp.down_proj.*", "write"),
        ("rotary_emb.inv_freq", "same"),
        ("norm.weight", "final gain"),
        ("lm_head.*", "head"),
        ("score.weight", "head"),
    ],
    "bert": [
        ("embeddings.word_embeddings.weight", "token"),
        ("embeddings.position_embeddings.weight", "position"),
        ("embeddings.token_type_embeddings.weight", "position"),
        ("embeddings.position_ids", "same"),
        ("embeddings.LayerNorm.weight", "post gain"),
        ("embeddings.LayerNorm.bias", "post bias"),
        ("encoder.layer.#.attention.self.query.*", "query"),
        ("encoder.layer.#.attention.self.key.*", "key"),
        ("encoder.layer.#.attention.self.value.*", "value"),
        ("encoder.layer.#.attention.output.dense.*", "attention output"),
        ("encoder.layer.#.attention.output.LayerNorm.weight", "post gain"),
        ("encoder.layer.#.attention.output.LayerNorm.bias", "post bias"),
        ("encoder.layer.#.intermediate.dense.*", "read"),
        ("encoder.layer.#.output.dense.*", "write"),
        ("encoder.layer.#.output.LayerNorm.weight", "post gain"),
        ("encoder.layer.#.output.LayerNorm.bias", "post bias"),
        ("pooler.dense.*", "read"),
        ("cls.predictions.transform.dense.*", "read"),
        ("cls.predictions.transform.LayerNorm.weight", "final gain"),
        ("cls.predictions.transform.LayerNorm.bias", "final bias"),
        ("cls.predictions.decoder.*", "head"),
        ("cls.predictions.bias", "same"),
        ("cls.seq_relationship.*", "head"),
        ("lm_head.dense.*", "read"),  # RoBERTa's head, and what classifies with it
        ("lm_head.layer_norm.weight", "final gain"),
        ("lm_head.layer_norm.bias", "final bias"),
        ("lm_head.decoder.*", "head"),
        ("lm_head.bias", "same"),
        ("classifier.dense.*", "read"),
        ("classifier.out_proj.*", "head"),
        ("classifier.*", "head"),
        ("qa_outputs.*", "head"),
    ],
    "vit": [
        ("embeddings.cls_token", "position"),
        ("embeddings.mask_token", "position"),
        ("embeddings.distillation_token", "position"),  # DeiT
        ("embeddings.position_embeddings", "position"),
        ("embeddings.patch_embeddings.projection.*", "patch"),
        ("encoder.layer.#.layernorm_*.weight", "norm gain"),
        ("encoder.layer.#.layernorm_*.bias", "norm bias"),
        ("encoder.layer.#.attention.attention.query.*", "query"),
        ("encoder.layer.#.attention.attention.key.*", "key"),
        ("encoder.layer.#.attention.attention.value.*", "value"),
        ("encoder.layer.#.attention.output.dense.*", "attention output"),
        ("encoder.layer.#.intermediate.dense.*", "read"),
        ("encoder.layer.#.output.dense.*", "write"),
        ("layers.#.layernorm_*.weight", "norm gain"),  # from transformers 5 on
        ("layers.#.layernorm_*.bias", "norm bias"),
        ("layers.#.attention.q_proj.*", "query"),
        ("layers.#.attention.k_proj.*", "key"),
        ("layers.#.attention.v_proj.*", "value"),
        ("layers.#.attention.o_proj.*", "attention output"),
        ("layers.#.mlp.fc1.*", "read"),
        ("layers.#.mlp.fc2.*", "write"),
        ("layernorm.weight", "final gain"),
        ("layernorm.bias", "final bias"),
        ("pooler.dense.*", "read"),
        ("*classifier.*", "head"),
    ],
    "opt": [
        ("embed_tokens.weight", "token"),
        ("embed_positions.weight", "position"),
        ("layers.#.*_layer_norm.weight", "norm gain"),
        ("layers.#.*_layer_norm.bias", "norm bias"),
        ("layers.#.self_attn.q_proj.*", "query"),
        ("layers.#.self_attn.k_proj.*", "key"),
        ("layers.#.self_attn.v_proj.*", "value"),
        ("layers.#.self_attn.out_proj.*", "attention output"),
        ("layers.#.fc1.*", "read"),
        ("layers.#.fc2.*", "write"),
        ("final_layer_norm.weight", "final gain"),
        ("final_layer_norm.bias", "final bias"),
        ("lm_head.*", "head"),
        ("score.weight", "head"),
    ],
    "gpt_neox": [
        ("embed_in.weight", "token"),
        ("layers.#.*_layernorm.weight", "norm gain"),
        ("layers.#.*_layernorm.bias", "norm bias"),
        ("layers.#.attention.query_key_value.*", "qkv by head"),
        ("layers.#.attention.dense.*", "attention output"),
        ("layers.#.attention.bias", "same"),  # masks of older versions
        ("layers.#.attention.masked_bias", "same"),
        ("layers.#.attention.rotary_emb.inv_freq", "same"),
        ("layers.#.mlp.dense_h_to_4h.*", "read"),
        ("layers.#.mlp.dense_4h_to_h.*", "write"),
        ("rotary_emb.inv_freq", "same"),
        ("final_layer_norm.weight", "final gain"),
        ("final_layer_norm.bias", "final bias"),
        ("embed_out.weight", "head"),
        ("lm_head.weight", "head"),
        ("score.*", "head"),
    ],
    "torch": [  # torch.nn.TransformerEncoder, and the usual names of what lies around it
        ("layers.#.self_attn.in_proj_*", "qkv"),
        ("layers.#.self_attn.out_proj.*", "attention output"),
        ("layers.#.linear1.*", "read"),
        ("layers.#.linear2.*", "write"),
        ("layers.#.norm?.weight", "norm gain"),
        ("layers.#.norm?.bias", "norm bias"),
        ("*norm*.weight", "final gain"),
        ("*norm*.bias", "final bias"),
        ("ln*.weight", "final gain"),
        ("ln*.bias", "final bias"),
        ("*pos*", "position"),
        ("*pos*.weight", "position"),
        ("pe", "position"),
        ("cls*", "position"),
        ("*emb*.weight", "token"),  # or a linear layer, which the caller takes for a patch
        ("*emb*.bias", "patch"),
        ("input*.*", "patch"),
        ("*tok*.weight", "token"),
        ("wte.weight", "token"),
        ("*head*.*", "head"),
        ("classifier.*", "head"),
        ("decoder.*", "head"),
        ("fc*.*", "head"),
        ("out*.*", "head"),
    ],
}
"""Family -> rows; names as Hugging Face and torch have them."""


@dataclass(frozen=True, slots=True)
class ParameterRole:
    """What a row says of one parameter."""

    role: str
    """One of `ROLES`."""

    layer: int | None
    """Number of its layer; None = outside of the layers."""


def find(rows: Sequence[tuple[str, str]], name: str) -> ParameterRole | None:
    """Return what the first matching row says of a name, or None. Raises `InputError` on an unknown role."""
    for pattern, role in rows:
        if match := _compiled(pattern).fullmatch(name):
            pick(ROLES, role, "role")
            return ParameterRole(role, int(match[1]) if match.groups() else None)
    return None


def family_of(names: Iterable[str]) -> str:
    """Return the family whose layers are recognised and which knows most of the names.

    Raises `InputError` where no family knows a layer, or half of the names.
    """
    known: dict[str, int] = {}
    names = list(names)
    for family, rows in FAMILIES.items():
        found = [find(rows, name) for name in names]
        if any(each is not None and each.layer is not None for each in found):
            known[family] = sum(each is not None for each in found)
    if not known:
        raise InputError(
            f"no family of models has layers named like {', '.join(names[:3])}. Known are {', '.join(FAMILIES)}; add "
            'one: headway.model.FAMILIES["mine"] = [(pattern, role), ...].'
        )
    best = max(known, key=known.__getitem__)
    if 2 * known[best] < len(names):
        missing = [name for name in names if find(FAMILIES[best], name) is None]
        raise InputError(
            f"no family knows this model. The nearest, {best!r}, has rows for {known[best]} of its {len(names)} names, "
            f'and none for {", ".join(missing[:3])}. Add one: headway.model.FAMILIES["mine"] = [(pattern, role), ...].'
        )
    return best


def roles_of(names: Iterable[str], family: str) -> dict[str, ParameterRole]:
    """Return what each parameter is. Raises `InputError` naming those that no row matches, and how to add one."""
    rows = pick(FAMILIES, family, "family of models")
    found = {name: find(rows, name) for name in names}
    unknown = [name for name, each in found.items() if each is None]
    if unknown:
        if experts := [name for name in unknown if re.search(r"expert|router|block_sparse_moe", name)]:
            raise InputError(
                f"{experts[0]} belongs to a mixture of experts, whose routing no rule preserves. Grow a dense model."
            )
        more = f" and {len(unknown) - 4} more" if len(unknown) > 4 else ""
        pattern = re.sub(r"\.\d+\.", ".#.", unknown[0])
        raise InputError(
            f"family {family!r} has no row for {', '.join(unknown[:4])}{more}. Say what it is: "
            f'headway.model.FAMILIES["{family}"].insert(0, ("{pattern}", ROLE)). {suggestion(ROLES, unknown[0])}'
        )
    return {name: each for name, each in found.items() if each is not None}


def axes_of(role: str, num_axes: int) -> tuple[str, ...]:
    """Return how each of a parameter's axes grows.

    >>> axes_of("write", 2), axes_of("write", 1), axes_of("patch", 4)
    (('stream', 'from_hidden'), ('stream',), ('stream', 'same', 'same', 'same'))
    """
    axes = ROLES[role]
    if "..." in axes:
        at = axes.index("...")
        return (*axes[:at], *("same",) * (num_axes - len(axes) + 1), *axes[at + 1 :])
    if num_axes == 1 and axes[0] == "same" and len(axes) > 1:
        return ("same",)  # the bias of a head
    return (*axes[:num_axes], *("same",) * (num_axes - len(axes)))


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    inner = re.escape(pattern).replace(r"\#", r"(\d+)").replace(r"\*", r"[^.]*").replace(r"\?", r"[^.]")
    return re.compile(rf"(?:[^.\d][^.]*\.)*{inner}")
