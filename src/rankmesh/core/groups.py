"""Groups: the ranks that agree on every coordinate except on the chosen axes.

A set of axes cuts the mesh in two patterns: what varies inside a group, and what varies between groups.

    rank = offset + base + member          base from the axes left out, member from the axes chosen

```
tp=2, cp=2, dp=2      groups("cp")            base   members 0  2
                                                0            0  2
                                                1            1  3
                                                4            4  6
                                                5            5  7
```

A kind of group may be narrowed twice: ``level`` regroups the positions of each group as one level of a hierarchy,
and ``pick`` keeps some positions. ``of(rank)`` is O(axes) and lists nobody; ``array`` is the whole world at once.

>>> from rankmesh.core.mesh import Mesh
>>> pipelines = Mesh(tp=2, pp=4).groups("pp")
>>> pipelines.array.tolist()
[[0, 2, 4, 6], [1, 3, 5, 7]]
>>> pipelines.of(5)
Group(1, 3, 5, 7)
>>> pipelines.pick((0, -1)).array.tolist()
[[0, 6], [1, 7]]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from rankmesh.core.axes import integer
from rankmesh.core.picks import Pick, PickLike
from rankmesh.core.rank_range import RankRange
from rankmesh.core.strided import IntArray, Strided
from rankmesh.errors import LayoutError, NotAMember, quoted

__all__ = ["Group", "Groups"]

_SHOWN = 8
# Up to this many ranks are listed one by one, which costs less than the first use of numpy in a process.
_FEW = 32


@dataclass(frozen=True, eq=False, repr=False)
class Group(Sequence[int]):
    """The members of one group, global ranks in the order of their positions.

    Stated by a base, a pattern and the positions taken from it; listed only when asked. Equal to any tuple or list
    of the same ranks in the same order.
    """

    rank_range: RankRange
    base: int
    members: Strided
    positions: Sequence[int]

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self.positions)

    @cached_property
    def array(self) -> IntArray:
        """The ranks as an int64 array of shape ``(size,)``, not writable."""
        if len(self.positions) <= _FEW:
            return _frozen(np.array(self.ranks, dtype=np.int64))
        values = self.members.values()
        if len(self.positions) != values.size or isinstance(self.positions, tuple):
            values = values[np.asarray(self.positions, dtype=np.int64)]
        return _frozen(self.rank_range.ranks(values + self.base))

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks as a tuple of ints."""
        if len(self.positions) <= _FEW:
            return tuple([self[position] for position in range(len(self.positions))])
        return tuple(self.array.tolist())

    def __len__(self) -> int:
        return len(self.positions)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        if isinstance(index, slice):
            chosen = range(*index.indices(len(self.positions)))
            return self.ranks[index] if len(chosen) > _FEW else tuple([self[position] for position in chosen])
        return self.rank_range.rank(self.base + self.members.value(self.positions[index]))

    def __iter__(self) -> Iterator[int]:
        return iter(self.ranks)

    def __contains__(self, rank: object) -> bool:
        return rank in self.ranks

    def index(self, rank: int, start: int = 0, stop: int | None = None) -> int:
        """Return the position of a rank in the group."""
        return self.ranks.index(rank, start, len(self) if stop is None else stop)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.array(self.array, dtype=dtype) if copy or dtype is not None else self.array

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Group):
            if self._stated == other._stated:
                return True
            return len(self) == len(other) and self.ranks == other.ranks
        if isinstance(other, tuple | list):
            return self.ranks == tuple(other)
        return NotImplemented

    def __hash__(self) -> int:
        return hash(self.ranks)

    @property
    def _stated(self) -> tuple[object, ...]:
        return self.base, self.members, self.positions, self.rank_range

    def __repr__(self) -> str:
        shown = ", ".join(map(str, (self[i] for i in range(min(_SHOWN, len(self))))))
        return f"Group({shown}{f', ... {len(self)} ranks' if len(self) > _SHOWN else ''})"


@dataclass(frozen=True)
class Groups(Sequence[Group]):
    """One kind of group: all groups along a set of axes, in the order of the axes left out (first fastest).

    ``members`` is the pattern along ``axes``; ``fixed`` has the size and stride of each axis left out.
    ``level`` is (stride, size) in positions, None for whole groups; ``picked`` are the positions kept, None for all.
    """

    rank_range: RankRange
    axes: tuple[str, ...]
    members: Strided
    fixed: Mapping[str, tuple[int, int]]
    level: tuple[int, int] | None = None
    picked: tuple[int, ...] | None = None

    @cached_property
    def bases(self) -> Strided:
        """The pattern of the axes that are left out, which tells groups apart."""
        return self.members.complement(self.rank_range.size)

    @property
    def size(self) -> int:
        """Number of ranks in each group."""
        return len(self.picked) if self.picked is not None else self._width

    @property
    def _width(self) -> int:
        return self.members.size if self.level is None else self.level[1]

    @property
    def _pieces(self) -> int:
        return self.members.size // self._width

    def __len__(self) -> int:
        return self.bases.size * self._pieces

    @overload
    def __getitem__(self, index: int) -> Group: ...
    @overload
    def __getitem__(self, index: slice) -> list[Group]: ...
    def __getitem__(self, index: int | slice) -> Group | list[Group]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"group {index} of {len(self)} groups along {'-'.join(self.axes)} does not exist")
        base, piece = divmod(index % len(self), self._pieces)
        return self._group(self.bases.value(base), piece)

    def __contains__(self, ranks: object) -> bool:
        """Return whether these ranks, in this order, are a group. Raises ``LayoutError`` for a single rank."""
        if isinstance(ranks, int | np.integer):
            raise LayoutError(
                f"rank {ranks} is tested for membership in a kind of group, whose elements are groups; "
                f"ask for a rank with groups.has({ranks}), or {ranks} in groups.of(rank)",
                rank=int(ranks),
            )
        ranks = ranks.tolist() if isinstance(ranks, np.ndarray) else ranks
        if not isinstance(ranks, Sequence) or not ranks or not isinstance(ranks[0], int | np.integer):
            return False
        first = int(ranks[0])
        return self.has(first) and self.of(first) == (ranks if isinstance(ranks, Group) else tuple(ranks))

    def __iter__(self) -> Iterator[Group]:
        return (self[index] for index in range(len(self)))

    def __eq__(self, other: object) -> bool:
        """Equal when they are the same groups of the same ranks, in the same order."""
        if not isinstance(other, Groups):
            return NotImplemented
        return self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[object, ...]:
        whole = self._width == self.members.size
        return self.rank_range, self.members, None if whole else self.level, self.picked

    def level_of(self, sizes: Sequence[int], level: int) -> Groups:
        """Regroup each group as one level of a hierarchy of its positions.

        ``sizes`` multiply to the group's size, the first level adjacent; level ``i`` groups the positions that
        differ only in digit ``i`` (hierarchical context parallelism in Megatron-Core).

        >>> from rankmesh.core.mesh import Mesh
        >>> ring = Mesh(cp=16).groups("cp")
        >>> [ring.level_of((2, 2, 4), level)[0].ranks for level in range(3)]
        [(0, 1), (0, 2), (0, 4, 8, 12)]
        """
        if self.level is not None or self.picked is not None:
            raise LayoutError("a level of groups that are narrowed already does not exist; take levels of whole groups")
        widths = tuple(integer(size, "size of a level", least=1) for size in sizes)
        if prod(widths) != self.members.size:
            raise LayoutError(
                f"level sizes {quoted(widths)} have the product {prod(widths)}, but groups along {'-'.join(self.axes)} "
                f"have {self.members.size} ranks; give sizes whose product is {self.members.size}",
                sizes=widths,
                size=self.members.size,
            )
        if integer(level, "level", least=0) >= len(widths):
            raise LayoutError(
                f"level {level} of {quoted(widths)} does not exist; give 0 to {len(widths) - 1}", level=level
            )
        return replace(self, level=(prod(widths[:level]), widths[level]))

    def pick(self, pick: PickLike) -> Groups:
        """Keep only the picked positions of each group; other ranks are in none of them."""
        if self.picked is not None:
            raise LayoutError("these groups are picked already; pick once, with all positions")
        picked = Pick.of(pick, self._width).positions_in(self._width)
        return replace(self, picked=None if picked == tuple(range(self._width)) else picked)

    @cached_property
    def array(self) -> IntArray:
        """All groups as an int64 array of shape ``(n_groups, size)``, not writable."""
        return _frozen(self.array_of(self.bases.values()))

    def array_of(self, bases: IntArray) -> IntArray:
        """Return the groups of some bases, ``(groups, size)``; a level cuts each into pieces."""
        members = self.members.values()
        if self.level is not None:
            stride, width = self.level
            members = members.reshape(-1, width, stride).swapaxes(1, 2).reshape(-1, width)
        if self.picked is not None:
            members = members[..., self.picked]
        whole = (bases.reshape(-1, *[1] * members.ndim) + members).reshape(-1, members.shape[-1])
        return self.rank_range.ranks(whole)

    def tolist(self) -> list[list[int]]:
        """Return all groups as lists of ints."""
        ranks: list[list[int]] = self.array.tolist()
        return ranks

    def of(self, rank: int) -> Group:
        """Return the group of one rank, without listing the others; ``NotAMember`` if a pick leaves the rank out."""
        return self.locate(rank)[0]

    def locate(self, rank: int) -> tuple[Group, int]:
        """Return the group of one rank, and its position there: its rank in the live group. Raises as ``of`` does."""
        at = self.rank_range.position(rank)
        found = self.locate_at(at)
        if found is None:
            position, picked = self._locate(at)[2], self.picked or ()
            raise NotAMember(
                f"rank {rank} is at position {position} of its group along {'-'.join(self.axes)}, but the pick keeps "
                f"positions {', '.join(map(str, picked))}; ask for a rank at one of them",
                rank=rank,
                position=position,
                picked=picked,
            )
        return found

    def locate_at(self, position: int) -> tuple[Group, int] | None:
        """Return the group at a position of the mesh, and the place in it; None where a pick leaves it out."""
        base, piece, place = self._locate(position)
        if self.picked is None:
            return self._group(base, piece), place
        return (self._group(base, piece), self.picked.index(place)) if place in self.picked else None

    def has(self, rank: int) -> bool:
        """Return whether the rank is in a group of this kind; O(axes)."""
        if rank not in self.rank_range:
            return False
        return self.picked is None or self._locate(self.rank_range.position(rank))[2] in self.picked

    def index_of(self, rank: int) -> int:
        """Return the index of the group of one rank: ``self[self.index_of(rank)] == self.of(rank)``."""
        base, piece, _ = self._locate(self.rank_range.position(rank))
        return self.bases.position(base) * self._pieces + piece

    def coordinate_of(self, rank: int) -> dict[str, int]:
        """Return the coordinate that all members of this rank's group agree on."""
        position = self.rank_range.position(rank)
        return {axis: position // stride % size for axis, (size, stride) in self.fixed.items()}

    def piece_of(self, rank: int) -> int | None:
        """Return a rank's piece of its whole group at this level, as a number; None for whole groups."""
        return None if self.level is None else self._locate(self.rank_range.position(rank))[1]

    @property
    def partition(self) -> tuple[object, ...]:
        """Key of a kind's groups: two kinds have the same groups on every rank if and only if their keys are equal."""
        level = self.level
        members = self.members if level is None else self.members.between(*level) or (self.members, level)
        return self.rank_range, members, self.picked

    def _locate(self, number: int) -> tuple[int, int, int]:
        """Return the base of a position's group, the piece of it at this level, and the place in the piece."""
        base, position, weight = number, 0, 1
        for size, stride in self.members.pairs:  # one rank's part of a plan is this, for each kind
            digit = number // stride % size
            base -= digit * stride
            position += digit * weight
            weight *= size
        if self.level is None:
            return base, 0, position
        stride, width = self.level
        inner, rest = position % stride, position // stride
        return base, rest // width * stride + inner, rest % width

    def _group(self, base: int, piece: int) -> Group:
        if self.level is None:
            positions: Sequence[int] = range(self.members.size)
        else:
            stride, width = self.level
            start = piece // stride * stride * width + piece % stride
            positions = range(start, start + width * stride, stride)
        if self.picked is not None:
            positions = tuple(positions[position] for position in self.picked)
        return Group(self.rank_range, base, self.members, positions)

    def __repr__(self) -> str:
        return f"Groups(axes={'-'.join(self.axes)!r}, {len(self)} groups of {self.size}: {self[0]!r}, ...)"


def _frozen(ranks: IntArray) -> IntArray:
    ranks.flags.writeable = False
    return ranks
