"""One tree of errors: each message states what is wrong, with the values, and one fix.

```
RankmeshError
├── LayoutError(ValueError)                 sizes, offsets, views, jobs that do not fit together
├── UnknownAxis(KeyError)                   an axis or view name that the mesh does not have
├── ClusterError(ValueError)                levels, hosts or files that describe no cluster
├── PlacementError(ValueError)              constraints, traffic or models that cannot be placed
├── PlanError(ValueError)                   group specs, options, recipes, saved plans
│   ├── UnknownGroup(KeyError)              a group name that the plan does not have
│   ├── UnknownArgument(TypeError)          an argument that a recipe or options do not have
│   └── SizesError(AssertionError)          sizes that do not fit the world, where peers assert it
├── AgreementError(RuntimeError)            ranks that do not hold the same plan, or never arrived
├── ConnectError(RuntimeError)              a live world that cannot serve the plan
│   ├── StoreLost(ConnectionError)          the store through which the ranks agree does not answer
│   ├── NotInitialized(AssertionError)      groups that a dialect's state does not hold yet, or any more
│   └── AlreadyInitialized(AssertionError)  a second initialisation of a dialect's state
├── RecordingError(ValueError)           a file or folder that holds no recording of a flight recorder
├── ProofError(RuntimeError)                a live group that gave a wrong answer
├── Diverged(RuntimeError)                  ranks that must hold the same, and do not
├── LostState(RuntimeError)                 tensors of which no rank that is left holds a part
├── TransferError(RuntimeError)             tensors that do not fit a transfer, or a transfer that ended incomplete
├── NotAMember(KeyError)                    a group that exists, but not for this rank
└── MissingExtra(ModuleNotFoundError)       a package that one of rankmesh's extras installs
```

The values that an error speaks of are its attributes, so that a program can act on them:

>>> try:
...     raise UnknownAxis("dpp", known=("tp", "dp"))
... except UnknownAxis as error:
...     print(error)
...     print(error.name, error.known)
unknown axis 'dpp': this mesh has the axes tp, dp; did you mean 'dp'?
dpp ('tp', 'dp')
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import wraps
from typing import ParamSpec, TypeVar

_Box = tuple[tuple[int, int], ...]

__all__ = [
    "AgreementError",
    "AlreadyInitialized",
    "ClusterError",
    "ConnectError",
    "Diverged",
    "LayoutError",
    "LostState",
    "MissingExtra",
    "NotAMember",
    "NotInitialized",
    "PlacementError",
    "PlanError",
    "ProofError",
    "RankmeshError",
    "RecordingError",
    "SizesError",
    "StoreLost",
    "TransferError",
    "UnknownArgument",
    "UnknownAxis",
    "UnknownGroup",
    "cut",
    "extra",
    "first_line",
    "in_words",
    "listed",
    "quoted",
    "quoted_path",
]

# What is meant by several names in one.
_AXES = "axes are joined by hyphens: '{0}'"
_KINDS = "a kind along several axes has a spec of its own, such as GroupSpec('{1}', axes='{0}')"

# How many ranks a message lists, of all and of the members of one group; how many characters of a line, value, path.
_RANKS, _MEMBERS, _CHARACTERS, _QUOTED, _PATH = 8, 16, 200, 80, 240


_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")
# Errors in a chain whose frames are dropped.
_CAUSES = 8


class RankmeshError(Exception):
    """The root of every error that rankmesh raises on purpose.

    Keyword arguments become attributes of the error.

    >>> RankmeshError("rank is 3", received=3).received
    3
    """

    def __init__(self, message: str, **values: object) -> None:
        super().__init__(message)
        self.message = message
        self.values = values
        for name, value in values.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> object:
        # Only reached when the attribute is absent; it tells type checkers that values are attributes.
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __str__(self) -> str:
        # KeyError would print the repr of its argument; every error here prints its sentence.
        return self.message

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, self.values)


def _rebuild(kind: type[RankmeshError], message: str, values: dict[str, object]) -> RankmeshError:
    error = kind.__new__(kind, message)
    RankmeshError.__init__(error, message, **values)
    return error


class LayoutError(RankmeshError, ValueError):
    """Sizes, offsets, views or jobs that do not fit together."""


class ClusterError(RankmeshError, ValueError):
    """Levels, hosts or files that do not describe a cluster, or a cluster with too few devices for the ranks."""


class PlacementError(RankmeshError, ValueError):
    """Constraints, traffic or a model for which rankmesh cannot compute a placement."""


class PlanError(RankmeshError, ValueError):
    """A group spec, option, recipe or saved plan that cannot be used."""


class UnknownArgument(PlanError, TypeError):
    """An argument that a recipe or options do not have; ``argument`` and ``known`` are attributes."""

    def __init__(self, argument: str, known: Iterable[str], what: str) -> None:
        known = tuple(known)
        # What is meant by a part of a name, or by one with a slip: world, timeot
        near = [name for name in known if argument in name or name in argument]
        near = near or get_close_matches(argument, known, n=1)
        meant = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
        super().__init__(f"{what} has no argument {quoted(argument)}; {meant}", argument=argument, known=known)


class AgreementError(RankmeshError, RuntimeError):
    """The ranks of a job do not hold the same plan, or some of them never arrived.

    ``rank`` raised it; ``ranks`` differ or are missing, of which ``missing`` did not arrive; ``fields`` differ. Each is
    empty where it does not apply.

    >>> AgreementError("rank 3 did not arrive", missing=(3,)).missing, AgreementError("another plan").missing
    ((3,), ())
    """

    rank: int | None = None
    ranks: Sequence[int] = ()
    missing: Sequence[int] = ()
    fields: Sequence[str] = ()


class ConnectError(RankmeshError, RuntimeError):
    """The live world cannot serve the plan: absent, of another size, already closed.

    ``rank`` raised it; ``ranks`` are the cause or the members of the group, of which ``missing`` did not respond. Each
    is empty where it does not apply.
    """

    rank: int | None = None
    ranks: Sequence[int] = ()
    missing: Sequence[int] = ()


class StoreLost(ConnectError, ConnectionError):
    """The store through which the ranks agree does not answer: its process has ended, or the network to it is down."""


class NotInitialized(ConnectError, AssertionError):
    """Groups that a dialect's state does not hold: not initialised yet, or destroyed. Peers assert it."""


class AlreadyInitialized(ConnectError, AssertionError):
    """A second initialisation of a dialect's state that still holds its groups. Peers assert it."""


class SizesError(PlanError, AssertionError):
    """Parallel sizes that do not fit together or do not fit the world, where a peer asserts it."""


class ProofError(RankmeshError, RuntimeError):
    """A live group gave an answer that differs from the plan's arithmetic."""


class RecordingError(RankmeshError, ValueError):
    """A file or folder that holds no recording that can be read; ``path`` is where."""


class TransferError(RankmeshError, RuntimeError):
    """Tensors that do not fit a transfer, or one that a rank could not finish: ``ranks`` failed.

    ``incomplete`` are the names of this rank's target tensors that are not wholly written.
    """

    ranks: Sequence[int] = ()
    incomplete: Sequence[str] = ()


class Diverged(RankmeshError, RuntimeError):
    """Ranks that must hold the same hold something else, or a value is not finite.

    ``step`` is the one of the check that found it, ``since`` the last at which the ranks were equal, None if there was
    none. ``ranks`` of ``group`` are in the minority, or all of both sides if they are ``tied``. ``box`` is where the
    first element of ``tensor`` differs, of ``count``; ``expected`` and ``got`` are its values. Each is None where it
    does not apply.
    """

    step: int
    tensor: str
    ranks: Sequence[int]
    since: int | None = None
    group: str | None = None
    box: _Box | None = None
    count: int = 0
    expected: complex | None = None
    got: complex | None = None
    tied: bool = False


class LostState(RankmeshError, RuntimeError):
    """State that no rank holds any more: ``missing`` has the tensor, the box of it, and the ranks that held it."""

    def __init__(self, missing: Sequence[tuple[str, _Box, tuple[int, ...]]], lost: Sequence[int]) -> None:
        missing = tuple(sorted(missing))
        name, box, ranks = missing[0]
        slices = ", ".join(f"{start}:{stop}" for start, stop in box)
        more = "" if len(missing) == 1 else f" (the first of {len(missing)} boxes)"
        super().__init__(
            f"no rank is left that holds {quoted(name)}{slices and f'[{slices}]'}, which {in_words(ranks)} had{more}; "
            "keep copies on other ranks with redundancy=1, or load what is lost from a checkpoint with restore=",
            missing=missing,
            lost=tuple(lost),
        )


class NotAMember(RankmeshError, KeyError):
    """The group exists, but this rank is not in it; ``groups.get(name)`` is then None, as with any mapping."""


class MissingExtra(RankmeshError, ModuleNotFoundError):
    """A package of an extra is not installed: ``name`` is the package, ``extra`` the extra that installs it."""


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Around the imports of an extra's packages: one that is not installed is a ``MissingExtra``.

    ```
    pip install rankmesh                 plans, training configs and the rankmesh command: numpy, typer, rich, PyYAML
    pip install 'rankmesh[torch]'        live groups, the simulator, dialects, checks
    pip install 'rankmesh[files]'        checkpoints of safetensors, read under any layout
    pip install 'rankmesh[testing]'      the pytest plugin and the strategies
    pip install 'rankmesh[mcp]'          rankmesh mcp, the tools of an agent
    ```

    >>> with extra("files"):
    ...     import a_package_that_nobody_has
    Traceback (most recent call last):
    rankmesh.errors.MissingExtra: the package 'a_package_that_nobody_has' is not installed; \
pip install 'rankmesh[files]'
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "rankmesh") or isinstance(error, MissingExtra):
            raise
        raise MissingExtra(
            f"the package {package!r} is not installed; pip install 'rankmesh[{name}]'",
            name=package,
            extra=name,
        ) from error


class UnknownAxis(RankmeshError, KeyError):
    """An axis (or view) name that the mesh does not have; ``name`` and ``known`` are attributes."""

    def __init__(self, name: str, known: Iterable[str], what: str = "axis") -> None:
        known = tuple(known)
        owner = "job" if what in ("mesh", "plan") else "mesh"
        plural = {"mesh": "meshes", "axis": "axes"}.get(what, what + "s")
        rule = f"this {owner} has the {plural} {', '.join(known)}" if known else f"this {owner} has no {plural}"
        super().__init__(
            f"unknown {what} {quoted(name)}: {rule}{_suggestion(name, known, _AXES if what == 'axis' else '')}",
            name=name,
            known=known,
            what=what,
        )


class UnknownGroup(PlanError, KeyError):
    """A group name that the plan does not have; ``name`` and ``known`` are attributes."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        known = tuple(known)
        rule = f"this plan has the groups {', '.join(known)}" if known else "this plan has no groups"
        super().__init__(
            f"unknown group {quoted(name)}: {rule}{_suggestion(name, known, _KINDS)}", name=name, known=known
        )


def _suggestion(name: object, known: tuple[str, ...], joined: str = "") -> str:
    """Return the known name that was meant, or several names; ``joined`` is how several are written."""
    plain = {_plain(other): other for other in known}
    near = [plain[_plain(name)]] if _plain(name) in plain else get_close_matches(str(name), known, n=1, cutoff=0.75)
    if not near and joined and (parts := _parts(_plain(name), plain)):
        return "; " + joined.format("-".join(parts), "_".join(parts))
    near = near or get_close_matches(str(name), known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _plain(name: object) -> str:
    return "".join(letter for letter in str(name).lower() if letter.isalnum())


def _parts(text: str, plain: Mapping[str, str]) -> list[str]:
    """Return the known names that a text consists of, in order; none if something is left over."""
    for name in sorted(plain, key=len, reverse=True):
        if name and text.startswith(name):
            rest = text[len(name) :]
            if not rest:
                return [plain[name]]
            if further := _parts(rest, plain):
                return [plain[name], *further]
    return []


def first_of(names: Sequence[object], most: int = 3) -> str:
    """List the first names for a message, and how many more there are.

    >>> first_of(["a.log", "b.log", "c.log", "d.log", "e.log"]), first_of(["a.log"])
    ('a.log, b.log, c.log and 2 more', 'a.log')
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


def counted(number: int, word: str) -> str:
    """Return a number with its word.

    >>> counted(1, "host"), counted(2, "host")
    ('1 host', '2 hosts')
    """
    return f"{number} {word}{'' if number == 1 else 's'}"


def in_words(ranks: Iterable[int]) -> str:
    """Ranks for a message, in order: ``rank 3``, or ``ranks 0, 1, ... and 62 more``.

    >>> in_words([3]), in_words([2, 0, 1])
    ('rank 3', 'ranks 0, 1, 2')
    """
    ascending = sorted(ranks)
    return f"rank{'' if len(ascending) == 1 else 's'} {first_of(ascending, _RANKS)}"


def listed(ranks: Sequence[int]) -> str:
    """Format the members of a group for a message, in their order; of many the first ones.

    >>> listed((0, 4)), listed(range(18))
    ('[0, 4]', '[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15] and 2 more')
    """
    more = f" and {len(ranks) - _MEMBERS} more" if len(ranks) > _MEMBERS else ""
    return f"{list(ranks[:_MEMBERS])}{more}"


def quoted(value: object, most: int = _QUOTED) -> str:
    """Return a value as a message quotes it: at most ``most`` characters of its repr.

    >>> quoted("tp=2"), len(quoted("tp" * 1000))
    ("'tp=2'", 80)
    """
    text = repr(value)
    return text if len(text) <= most else f"{text[: most - 4]}...{text[-1]}"


def quoted_path(path: object) -> str:
    """Return the path of a file as a message quotes it: whole up to 240 characters.

    >>> quoted_path("run.sh")
    "'run.sh'"
    """
    return quoted(str(path), _PATH)


def cut(text: str) -> str:
    """Return a text as a message shows it without quotes: at most 80 characters.

    >>> cut("tp" * 1000)[-6:], len(cut("tp" * 1000))
    ('tpt...', 80)
    """
    return text if len(text) <= _QUOTED else f"{text[: _QUOTED - 3]}..."


def at_caller(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """Let a function's errors end at the line that called it: RANKMESH_DEBUG=1 shows the frames inside.

    For functions that call nothing of their caller's. Other errors than these of rankmesh keep their frames.
    """

    @wraps(function)
    def called(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        try:
            return function(*args, **kwargs)
        except RankmeshError as error:
            if os.environ.get("RANKMESH_DEBUG"):
                raise
            inner: BaseException | None = error
            for _ in range(_CAUSES):
                if inner is not None:
                    inner.__traceback__ = None
                    inner = inner.__cause__ or inner.__context__
            raise error

    return called


def first_line(error: BaseException) -> str:
    r"""Return the first line of an error, or its type where it has no text.

    >>> first_line(ValueError("one\ntwo")), first_line(KeyError())
    ('one', 'KeyError')
    """
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:_CHARACTERS]
