"""A transformer and how it is trained: the numbers that traffic and memory follow from.

>>> llama = Transformer(layers=32, hidden=4096, heads=32, ffn_hidden_size=14336, vocabulary=128256, kv_heads=8,
...                     gated=True, tied=False)
>>> f"{llama.parameters / 1e9:.2f} billion"
'8.03 billion'
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from rankmesh.core.axes import check_number
from rankmesh.errors import PlacementError, quoted

__all__ = [
    "ATTENTION",
    "CONTEXT",
    "OVERLAP",
    "PRECISION",
    "RECOMPUTE",
    "SCHEDULE",
    "Sizes",
    "Training",
    "Transformer",
    "check_sizes",
]

CONTEXT = ("all-gather", "ring", "all-to-all")
RECOMPUTE = ("none", "selective", "operators", "full")
ATTENTION = ("flash", "unfused")
PRECISION = ("bf16", "fp8")
SCHEDULE = ("1f1b", "dualpipe")
OVERLAP = ("dp", "cp", "pp", "tp", "ep")


@dataclass(frozen=True)
class Sizes:
    """The sizes of a layout: ``tp * cp * dp * pp`` ranks; experts are cut ``ep`` ways, each over ``etp`` ranks."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def world(self) -> int:
        """All ranks."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def replicas(self) -> int:
        """Ranks that hold the same dense weights."""
        return self.dp * self.cp

    @property
    def expert_replicas(self) -> int:
        """Ranks that hold the same experts."""
        return self.tp * self.replicas // (self.ep * self.etp)

    def stages(self, layers: int) -> tuple[int, ...]:
        """Return the layers of each pipeline stage; what does not divide is left to the middle, as the ends do more.

        >>> Sizes(pp=4).stages(8), Sizes(pp=4).stages(14), Sizes(pp=16).stages(126)[:3]
        ((2, 2, 2, 2), (3, 4, 4, 3), (7, 8, 8))
        """
        return _stages(layers, self.pp)


@cache
def _stages(layers: int, pp: int) -> tuple[int, ...]:
    least, more = divmod(layers, pp)
    order = sorted(range(pp), key=lambda stage: (stage == pp - 1, stage == 0, stage))
    return tuple(least + (rank < more) for _, rank in sorted((stage, rank) for rank, stage in enumerate(order)))


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
    ``value_width``   of a head's values, where it is not ``width`` (MLA)
    ``window``        tokens that a query sees at most in ``windowed`` blocks (None: in all); 0: all before it
    ``mtp_layers``    further blocks on the last stage that predict later tokens (multi-token prediction)

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
    value_width: int | None = None
    window: int = 0
    windowed: int | None = None
    mtp_layers: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "ffn_hidden_size", "vocabulary", "expert_every"):
            check_number(getattr(self, name), name, PlacementError, name=name)
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
        """The width of all keys."""
        return (self.kv_heads or self.heads) * (self.width or self.hidden // self.heads)

    @property
    def values(self) -> int:
        """The width of all values."""
        return (self.kv_heads or self.heads) * (self.value_width or self.width or self.hidden // self.heads)

    @property
    def attended(self) -> int:
        """The width of the output of attention: a value for each head."""
        return self.heads * (self.value_width or self.width or self.hidden // self.heads)

    def pairs(self, sequence: int, *, causal: bool = True) -> float:
        """Keys that a query of a sequence meets, on average over its tokens and the blocks.

        >>> Transformer(layers=2, hidden=8, heads=1, ffn_hidden_size=8, vocabulary=8).pairs(4)
        2.5
        """
        whole = (sequence + 1) / 2 if causal else float(sequence)
        if not 0 < self.window < sequence:
            return whole
        seen = (self.window * (self.window + 1) / 2 + (sequence - self.window) * self.window) / sequence
        windowed = 1.0 if self.windowed is None else self.windowed / self.layers
        return windowed * seen + (1 - windowed) * whole

    @property
    def matrices(self) -> int:
        """Matrices of a feed-forward layer."""
        return 3 if self.gated else 2

    def expert_layers(self, start: float, stop: float) -> float:
        """Count the blocks from ``start`` to ``stop`` with experts: each last of ``expert_every`` that is not dense."""
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
    def expert_width(self) -> int:
        """The width of one expert."""
        return self.moe_ffn_hidden_size or self.ffn_hidden_size

    @property
    def expert(self) -> int:
        """Parameters of one expert."""
        return self.matrices * self.hidden * self.expert_width

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
        return self.parameters - int(self.expert_layers(0, self.layers)) * (self.experts - self.top_k) * self.expert

    @property
    def shared(self) -> int:
        """Parameters of the shared expert of one block."""
        return self.matrices * self.hidden * self.shared_ffn_hidden_size


@dataclass(frozen=True)
class Training:
    """The training of a model: the batch of a step, and which data are kept, recomputed and sent, in which types.

    ``batch``        sequences of one step, in all; ``microbatch``: sequences that one replica computes at a time
    ``sequence``     tokens of a sequence
    ``sequence_parallel``   tensor parallel ranks split the tokens between their layers; None: where tp is above 1
    ``context``      how context parallel attention sees the others: all-gather, ring, all-to-all
    ``virtual_stages``   parts of the layers on each pipeline stage (interleaved 1F1B); 1: plain 1F1B
    ``schedule``     1f1b, or dualpipe (DeepSeek-V3): each device holds two stages, the first and the last on one
    ``zero``         0: gradients are all-reduced; 1: the optimizer is sharded; 2: gradients too; 3: weights too (FSDP)
    ``replicate``    copies of the shards (HSDP, optimizer instances): weights are sharded over dp·cp / replicate ranks
    ``recompute``    none; selective: what is cheap to compute again; operators: every second matrix product, as
                     torchtitan's selective checkpointing; full: whole layers
    ``attention``    flash: scores are not kept; unfused: they are, and the masked half is computed, too
    ``dropout``      whether masks of dropout are kept
    ``precision``    of matrix products of the blocks: bf16 or fp8
    ``overlap``      communication that hides behind computation: of dp, cp, pp (with virtual stages), tp, ep
    ``activation``, ``gradient``, ``parameter``, ``scalar``   bytes of one value of each
    ``state``        bytes that the optimizer keeps of a parameter: 12 for Adam with a copy in single precision
    """

    batch: int
    sequence: int
    microbatch: int = 1
    sequence_parallel: bool | None = None
    context: str = "ring"
    virtual_stages: int = 1
    schedule: str = "1f1b"
    zero: int = 1
    replicate: int = 1
    recompute: str = "none"
    attention: str = "flash"
    dropout: bool = False
    precision: str = "bf16"
    overlap: tuple[str, ...] = ("dp", "cp", "pp")
    activation: int = 2
    gradient: int = 4
    parameter: int = 2
    scalar: int = 4
    state: int = 12

    def __post_init__(self) -> None:
        for name in ("batch", "sequence", "microbatch", "virtual_stages", "replicate", "activation", "gradient",
                     "parameter", "scalar", "state"):  # fmt: skip
            check_number(getattr(self, name), name, PlacementError, name=name)
        for name, known in (("context", CONTEXT), ("recompute", RECOMPUTE), ("attention", ATTENTION),
                            ("precision", PRECISION), ("schedule", SCHEDULE), ("zero", (0, 1, 2, 3))):  # fmt: skip
            _one_of(name, getattr(self, name), known)
        object.__setattr__(self, "overlap", tuple(self.overlap))
        for name in self.overlap:
            _one_of("overlap", name, OVERLAP)

    def split(self, tp: int) -> int:
        """Return how many tensor parallel ranks split the tokens between layers: 1 without sequence parallelism."""
        return 1 if self.sequence_parallel is False else tp

    def tokens(self, cp: int) -> float:
        """Tokens of a microbatch on one rank, before tensor parallel ranks split them."""
        return self.microbatch * self.sequence / cp

    def microbatches(self, replicas: int) -> float:
        """Microbatches of one replica in a step."""
        return self.batch / replicas / self.microbatch


def check_sizes(model: Transformer, training: Training, sizes: Sizes) -> None:
    """Refuse sizes that do not cut the model or the batch, naming what would."""
    replicas = sizes.dp * training.microbatch
    if training.batch % replicas:
        raise PlacementError(
            f"a batch of {training.batch} does not divide into microbatches of {training.microbatch} on dp {sizes.dp} "
            f"replicas; give a multiple of {replicas}",
            batch=training.batch,
            dp=sizes.dp,
        )
    if sizes.pp > model.layers:
        raise PlacementError(
            f"pp is {sizes.pp}, but the model has {model.layers} layers; take a pp of at most {model.layers}",
            pp=sizes.pp,
        )
    if sizes.ep > 1 and (not model.experts or model.experts % sizes.ep):
        raise PlacementError(
            f"ep is {sizes.ep}, but the model has {model.experts or 'no'} experts; "
            + (f"take an ep that divides {model.experts}" if model.experts else "leave ep out, or give its model"),
            ep=sizes.ep,
        )


def _one_of(name: str, value: object, known: Iterable[object]) -> None:
    if value not in tuple(known):
        raise PlacementError(
            f"{name} is {quoted(value)}; give one of {', '.join(map(str, known))}", received=value, name=name
        )
