"""Megatron's rank arithmetic as functions and a class: groups of ranks from sizes and an order.

>>> RankGenerator(tp=2, ep=1, dp=2, pp=2, cp=1, order="tp-dp-pp").get_ranks("tp-pp")
[[0, 1, 4, 5], [2, 3, 6, 7]]
"""

# No postponed annotations here: the signatures are those of Megatron-Core, annotations and all.

from typing import List  # noqa: UP035

from rankmesh.core.mesh import Mesh
from rankmesh.core.recipes.megatron_core import with_pieces
from rankmesh.dialects.megatron.refusals import Refused, UnknownName, refusals

__all__ = [
    "RankGenerator",
    "WithPieces",
    "default_embedding_ranks",
    "default_position_embedding_ranks",
    "generate_masked_orthogonal_rank_groups",
]


def generate_masked_orthogonal_rank_groups(
    world_size: int,
    parallel_size: List[int],  # noqa: UP006
    mask: List[bool],  # noqa: UP006
) -> List[List[int]]:  # noqa: UP006
    """Return the groups along the axes that the mask names, of axes with these sizes, the first adjacent.

    >>> generate_masked_orthogonal_rank_groups(8, [2, 2, 2], [False, True, False])
    [[0, 2], [1, 3], [4, 6], [5, 7]]
    """
    with refusals():
        mesh = Mesh.of({f"axis_{place}": size for place, size in enumerate(parallel_size)})
        chosen = [f"axis_{place}" for place, wanted in enumerate(mask) if wanted]
        if mesh.size != world_size:
            raise Refused(
                f"world_size is {world_size}, but the product of {list(parallel_size)} is {mesh.size}; change one",
                world_size=world_size,
            )
        return mesh.groups(chosen).tolist() if chosen else [[rank] for rank in range(world_size)]


class RankGenerator:
    """The groups of one factorisation of the world: dense layers (ep = 1) or experts (cp = 1).

    ``order`` names the axes, fastest first; an axis of size 1 may be left out. An order that names an axis twice, of
    which Megatron-Core makes ranks outside the world, is refused, and so is an axis that there is not.
    """

    # Whether the axis of the pieces of weights, gtp_remat, is named where its size is 1 too.
    _names_pieces = False

    def __init__(
        self,
        tp: int,
        ep: int,
        dp: int,
        pp: int,
        cp: int,
        order: str,
        rank_offset: int = 0,
        gtp_remat: int = 1,
    ) -> None:
        if ep > 1 and cp > 1:
            raise Refused(
                f"ep is {ep} and cp is {cp}, but cp factors dense layers and ep experts; make a generator for each"
            )
        self.tp, self.ep, self.dp, self.pp, self.cp, self.gtp_remat = tp, ep, dp, pp, cp, gtp_remat
        self.rank_offset = rank_offset
        self.world_size = tp * dp * pp * cp * ep * gtp_remat
        self.name_to_size = {"tp": tp, "pp": pp, "dp": dp, "ep": ep, "cp": cp}
        if self._names_pieces or gtp_remat != 1 or "gtp_remat" in order:
            self.name_to_size["gtp_remat"] = gtp_remat
        with refusals():
            self._mesh = Mesh.of(self.name_to_size, offset=rank_offset).reorder(order.lower())
        self.order = "-".join(self._mesh.axes)
        self.ordered_size = list(self._mesh.axes.values())

    def get_mask(self, order: str, token: str) -> List[bool]:  # noqa: UP006
        """Return the axes that the token names, in the order's order."""
        named = token.split("-")
        unknown = [name for name in named if name not in order.split("-")]
        if unknown:
            raise UnknownName(f"{token!r} names {unknown[0]!r}, but the axes are {order}; use these", name=unknown[0])
        return [name in named for name in order.split("-")]

    def get_ranks(self, token: str) -> List[List[int]]:  # noqa: UP006
        """Return the groups along the axes that the token names: ``"dp-cp"``."""
        self.get_mask(self.order, token)
        return self._mesh.groups(dict.fromkeys(token.split("-"))).tolist()


class WithPieces(RankGenerator):
    """As of Megatron-Core 0.19: there is always an axis ``gtp_remat``, of the ranks that hold pieces of a weight."""

    _names_pieces = True

    def get_gtp_ranks(self, gtp_remat_size: int) -> List[List[int]]:  # noqa: UP006
        """Return the groups along gtp_remat, whose size must be the one given; groups of one rank where it is 1."""
        if gtp_remat_size != self.gtp_remat:
            raise Refused(
                f"gtp_remat_size is {gtp_remat_size}, but gtp_remat has size {self.gtp_remat}; ask for that size",
                received=gtp_remat_size,
            )
        return self.get_ranks("gtp_remat")


def _inject_gtp_remat_axis(order_str: str, after: str = "tp") -> str:
    """Return the order with the axis gtp_remat behind another, or behind tp, unless it names it.

    >>> _inject_gtp_remat_axis("tp-cp-ep-dp-pp", "ep"), _inject_gtp_remat_axis("tp-dp-pp", "ep")
    ('tp-cp-ep-gtp_remat-dp-pp', 'tp-gtp_remat-dp-pp')
    """
    return "-".join(with_pieces(tuple(order_str.split("-")), after))


def default_embedding_ranks(pp_ranks):  # type: ignore[no-untyped-def]
    """Return the first and the last stage of a pipeline, which hold the word embeddings.

    >>> default_embedding_ranks([1, 3, 5]), default_embedding_ranks([4])
    ([1, 5], [4])
    """
    return list(dict.fromkeys((pp_ranks[0], pp_ranks[-1])))


def default_position_embedding_ranks(pp_ranks):  # type: ignore[no-untyped-def]
    """Return the first stage of a pipeline, which holds the position embeddings.

    >>> default_position_embedding_ranks([1, 3, 5])
    [1]
    """
    return [pp_ranks[0]]
