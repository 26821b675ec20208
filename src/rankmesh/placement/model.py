"""A transformer and how it is trained: the numbers that traffic and memory follow from.

>>> llama = Transformer(layers=32, hidden=4096, heads=32, ffn_hidden_size=14336, vocabulary=128256, kv_heads=8,
...                     gated=True, tied=False)
>>> f"{llama.parameters / 1e9:.2f} billion"
'8.03 billion'
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from rankmesh.errors import PlacementError, quoted

__all__ = ["CONTEXT", "DATA", "Training", "Transformer"]

CONTEXT = ("all-gather", "ring", "all-to-all")
DATA = ("all-reduce", "sharded", "fsdp")


@dataclass(frozen=True)
class Transformer:
    """A decoder: blocks of attention and feed-forward, every ``expert_every``-th of them with experts.

    ``hidden``, ``heads``, ``kv_heads`` (None: as heads), ``width`` of a head (None: hidden / heads)
    ``ffn_hidden_size``  of a feed-forward layer; ``gated``: with a third matrix (SwiGLU)
    ``vocabulary``    rows of the embedding; ``tied``: the output uses the same table
    ``experts``       in each block that has some, of which a token uses ``top_k``
    ``moe_ffn_hidden_size``  of one expert (None: ``ffn_hidden_size``)
    ``shared_ffn_hidden_size``  of an expert that every token uses
    ``dense_layers``  the first blocks, which have no experts
    ``attention_weights``  parameters of one attention layer that is not four matrices, such as a latent one (MLA)

    Weights of norms count, biases do not: they are below a thousandth of the rest.
    """

    layers: int
    hidden: int
    heads: int
    ffn_hidden_size: int
    vocabulary: int
    kv_heads: int | None = None
    width: int | None = None
    gated: bool = False
    tied: bool = True
    experts: int = 0
    top_k: int = 1
    moe_ffn_hidden_size: int | None = None
    expert_every: int = 1
    shared_ffn_hidden_size: int = 0
    dense_layers: int = 0
    attention_weights: int | None = None

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "ffn_hidden_size", "vocabulary", "expert_every"):
            _positive(name, getattr(self, name))
        if self.experts and not 1 <= self.top_k <= self.experts:
            raise PlacementError(
                f"top_k is {quoted(self.top_k)}; give 1 to {self.experts}, as there are {self.experts} experts"
            )

    @property
    def queries(self) -> int:
        """The width of all queries."""
        return self.heads * (self.width or self.hidden // self.heads)

    @property
    def keys(self) -> int:
        """The width of all keys, and that of all values."""
        return (self.kv_heads or self.heads) * (self.width or self.hidden // self.heads)

    @property
    def matrices(self) -> int:
        """Matrices of a feed-forward layer."""
        return 3 if self.gated else 2

    def expert_layers(self, start: float, stop: float) -> float:
        """How many of the blocks from ``start`` to ``stop`` have experts: each last of ``expert_every``, none dense."""
        if not self.experts:
            return 0
        first, last = max(start, self.dense_layers), max(stop, self.dense_layers)
        return last // self.expert_every - first // self.expert_every

    @property
    def attention(self) -> int:
        """Parameters of one attention layer."""
        if self.attention_weights is not None:
            return self.attention_weights
        return self.hidden * (2 * self.queries + 2 * self.keys)

    @property
    def expert(self) -> int:
        """Parameters of one expert."""
        return self.matrices * self.hidden * (self.moe_ffn_hidden_size or self.ffn_hidden_size)

    @property
    def parameters(self) -> int:
        """All parameters."""
        with_experts = int(self.expert_layers(0, self.layers))
        dense = (self.layers - with_experts) * self.matrices * self.hidden * self.ffn_hidden_size
        mixed = with_experts * (self.experts * (self.expert + self.hidden) + self.shared)
        tables = (1 if self.tied else 2) * self.vocabulary * self.hidden
        return self.layers * (self.attention + 2 * self.hidden) + dense + mixed + tables + self.hidden

    @property
    def active(self) -> int:
        """Parameters that one token uses."""
        return self.parameters - int(self.expert_layers(0, self.layers)) * (self.experts - self.top_k) * self.expert \
            if self.experts else self.parameters  # fmt: skip

    @property
    def shared(self) -> int:
        """Parameters of the shared expert of one block."""
        return self.matrices * self.hidden * self.shared_ffn_hidden_size


@dataclass(frozen=True)
class Training:
    """How a model is trained: the batch of a step, and what is sent in which form.

    ``batch``        sequences of one step, in all; ``microbatch``: sequences that one replica computes at a time
    ``sequence``     tokens of a sequence
    ``sequence_parallel``   tensor parallel ranks split the tokens between their layers
    ``context``      how context parallel attention sees the others: all-gather, ring, all-to-all
    ``chunks``       of layers on each pipeline stage (interleaved 1F1B); 1: none
    ``data``         gradients: all-reduce, sharded optimizer (reduce-scatter, all-gather), or fsdp (weights too)
    ``activation``, ``gradient``, ``parameter``, ``scalar``   bytes of one value of each
    """

    batch: int
    sequence: int
    microbatch: int = 1
    sequence_parallel: bool = False
    context: str = "ring"
    chunks: int = 1
    data: str = "sharded"
    activation: int = 2
    gradient: int = 4
    parameter: int = 2
    scalar: int = 4

    def __post_init__(self) -> None:
        for name in ("batch", "sequence", "microbatch", "chunks", "activation", "gradient", "parameter", "scalar"):
            _positive(name, getattr(self, name))
        for name, known in (("context", CONTEXT), ("data", DATA)):
            if getattr(self, name) not in known:
                raise PlacementError(f"{name} is {quoted(getattr(self, name))}; give one of {', '.join(known)}")

    def microbatches(self, replicas: int) -> float:
        """Microbatches of one replica in a step."""
        return self.batch / replicas / self.microbatch


def _positive(name: str, value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not isfinite(value) or value <= 0:
        raise PlacementError(f"{name} is {quoted(value)}; give a number above 0", received=value, name=name)
