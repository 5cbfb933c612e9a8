"""The shape of a transformer language model: how many parameters it has.

Defaults are a GPT: learned positions, biases, layer norm, a feed-forward
layer of four times the hidden size, input and output embeddings tied. The
switches make a Llama.

>>> Transformer(12, 768, 12, sequence=1024, vocabulary=50257).num_parameters
124439808
>>> Transformer(32, 4096, 32, sequence=4096, vocabulary=32000, ffn=11008, gated=True,
...             biases=False, positions=False, tied=False).num_parameters
6738415616
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.core.errors import InputError


@dataclass(frozen=True, slots=True)
class Transformer:
    """A decoder-only transformer."""

    layers: int
    """L, number of layers."""

    hidden: int
    """h, hidden size."""

    heads: int
    """a, number of attention heads."""

    sequence: int
    """s, tokens per sequence."""

    vocabulary: int
    """V, vocabulary size (padded, if it is padded in the job)."""

    ffn: int = 0
    """Width of the feed-forward layer; 0 = 4 h."""

    kv_heads: int = 0
    """Heads of keys and values (grouped-query attention); 0 = as many as `heads`."""

    gated: bool = False
    """Whether the feed-forward layer has a third matrix (SwiGLU)."""

    biases: bool = True
    """Whether linear layers and norms have biases."""

    positions: bool = True
    """Whether positions are learned parameters."""

    tied: bool = True
    """Whether the output layer is the input embedding."""

    def __post_init__(self) -> None:
        """Check the sizes and fill in the defaults; raises `InputError`."""
        for name in ("layers", "hidden", "heads", "sequence", "vocabulary"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; give a whole number >= 1.")
        object.__setattr__(self, "ffn", self.ffn or 4 * self.hidden)
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        if self.ffn < 1 or self.kv_heads < 1:
            raise InputError(f"ffn is {self.ffn}, kv_heads {self.kv_heads}; give 0 for the default or a number >= 1.")
        if self.hidden % self.heads or self.heads % self.kv_heads:
            raise InputError(
                f"hidden {self.hidden} / heads {self.heads} / kv_heads {self.kv_heads} do not divide. "
                "Make hidden a multiple of heads and heads a multiple of kv_heads."
            )

    @property
    def matrix_parameters(self) -> int:
        """Weights of the matrices of one layer: 12 h^2 in a GPT."""
        attention = 2 * self.hidden**2 + 2 * self.hidden * self.hidden * self.kv_heads // self.heads
        return attention + (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer: 12 h^2 + 13 h in a GPT."""
        norms = 2 * self.hidden * (2 if self.biases else 1)
        keys = self.hidden * self.kv_heads // self.heads
        biases = 2 * self.hidden + 2 * keys + (2 if self.gated else 1) * self.ffn + self.hidden
        return self.matrix_parameters + norms + (biases if self.biases else 0)

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the input embedding and of positions."""
        return (self.vocabulary + (self.sequence if self.positions else 0)) * self.hidden

    @property
    def num_parameters(self) -> int:
        """All parameters."""
        final = self.hidden * (2 if self.biases else 1)
        output = 0 if self.tied else self.vocabulary * self.hidden
        return self.layers * self.layer_parameters + self.embedding_parameters + final + output
