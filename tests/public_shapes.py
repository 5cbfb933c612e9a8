"""Shapes of published models, in the names that their checkpoints use."""


def _llama(num_layers: int, width: int, inner: int, key_value: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, width)}
    for layer in range(num_layers):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "self_attn.q_proj": (width, width), "self_attn.k_proj": (key_value, width),
                "self_attn.v_proj": (key_value, width), "self_attn.o_proj": (width, width),
                "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner),
                "input_layernorm": (width,), "post_attention_layernorm": (width,),
            }.items()
        }  # fmt: skip
    return shapes | {"model.norm.weight": (width,), "lm_head.weight": (vocabulary, width)}


LLAMA_3_8B = _llama(num_layers=32, width=4096, inner=14336, key_value=1024, vocabulary=128256)
"""Meta-Llama-3-8B: name -> shape; 8 030 261 248 parameters, stored as bfloat16."""
