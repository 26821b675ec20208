"""Options of a group: how its process group is made. None means inherited.

```
mesh options   <-  view options  <-  group options          the nearest that is not None counts
timeout=1800       timeout=600       (None)                 effective: 600
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypedDict, cast

from rankmesh.errors import PlanError, UnknownArgument, quoted

if TYPE_CHECKING:
    from typing_extensions import Unpack  # in typing from Python 3.11 on

__all__ = ["GivenOptions", "NcclConfig", "NcclValue", "Options", "flag", "time_limit"]

NcclValue = int | float | str | bool
NcclConfig = Mapping[str, NcclValue] | Iterable[tuple[str, NcclValue]]

# Stores count in milliseconds, and take zero for no limit at all.
_MIN_LIMIT, _MAX_LIMIT = 0.001, 1e9
# Seconds; the largest timedelta, which is what a timeout becomes.
_LONGEST = timedelta.max.total_seconds()


class GivenOptions(TypedDict, total=False):
    """Keywords that ``Options`` and ``GroupSpec`` take as options."""

    backend: str | None
    timeout: float | timedelta | None
    nccl: NcclConfig | None
    high_priority: bool | None
    sharp: bool | None
    share: bool | None
    overlap: str | None
    lazy: bool | None


def _text(name: str, value: object) -> str:
    if isinstance(value, str) and value:
        return value
    raise _refused(name, value, "give a name, such as 'gloo'")


def flag(name: str, value: object) -> bool:
    """Return ``value`` if it is a bool."""
    if isinstance(value, bool):
        return value
    raise _refused(name, value, "give True or False")


def _seconds(name: str, value: object) -> float:
    if not 0 < (seconds := _in_seconds(value)) <= _LONGEST:
        raise _refused(name, value, "give a number of seconds above 0, or a timedelta")
    return seconds


def _in_seconds(value: object) -> float:
    """Return a number or a timedelta in seconds; 0 for anything else."""
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    return float(seconds) if isinstance(seconds, int | float) and not isinstance(seconds, bool) else 0.0


def time_limit(timeout: object) -> timedelta:
    """Return the time limit of a call, given in seconds or as a timedelta. Raises ``PlanError`` for none, 0 or less.

    >>> time_limit(1.5)
    datetime.timedelta(seconds=1, microseconds=500000)
    """
    if not _MIN_LIMIT <= (seconds := _in_seconds(timeout)) <= _MAX_LIMIT:
        raise PlanError(
            f"timeout is {quoted(timeout)}; give a timedelta or a number of seconds from {_MIN_LIMIT:g} to "
            f"{_MAX_LIMIT:g}, or leave it out for the default",
            received=timeout,
        )
    return timedelta(seconds=seconds)


def _config(name: str, value: object) -> tuple[tuple[str, NcclValue], ...]:
    try:
        if isinstance(value, str):
            raise TypeError
        config = dict(value)  # type: ignore[call-overload]  # TypeError is caught
    except (TypeError, ValueError):
        config = {None: None}
    for key, setting in config.items():
        if not isinstance(key, str) or not _is_setting(setting):
            raise _refused(name, value, "map names of NCCL options to numbers or words, such as {'max_ctas': 8}")
    return tuple(sorted((key, _plain(setting)) for key, setting in config.items()))


def _refused(name: str, value: object, fix: str) -> PlanError:
    return PlanError(f"{name} is {quoted(value)}; {fix}", option=name, received=value)


def _is_setting(setting: object) -> bool:
    # Numbers of 64 bits, as a saved plan may hold them; a NaN or an infinity compares as neither.
    return isinstance(setting, str) or (isinstance(setting, int | float) and -(2**63) <= setting < 2**63)


def _plain(setting: NcclValue) -> NcclValue:
    """Return one spelling for settings that are equal: 1, 1.0 and True are all 1, as NCCL's fields are integers."""
    if isinstance(setting, int) or (isinstance(setting, float) and setting.is_integer()):
        return int(setting)
    return setting


def _checked(check: Callable[[str, object], object]) -> Any:
    """Return a dataclass field; ``check`` takes its name and value, and normalises or refuses the value."""
    return field(default=None, metadata={"check": check})


@dataclass(frozen=True, init=False, repr=False)
class Options:
    """The options of one group; every field may be None, which means inherited.

    ``backend``        a torch backend ("nccl", "gloo", "cpu:gloo,cuda:nccl"); default: the world's
    ``timeout``        seconds (a number or a timedelta); default: the world's
    ``nccl``           fields of the NCCL communicator configuration (min_ctas, max_ctas, cga_cluster_size, ...)
    ``high_priority``  run the group's collectives on a high-priority stream
    ``sharp``          let the network switch reduce (NCCL CollNet)
    ``share``          False: never use one communicator with another group
    ``overlap``        a class of groups that run at the same time as others: never shared with another class
    ``lazy``           create the process group at its first use, which waits for the other members
    """

    backend: str | None = _checked(_text)
    timeout: float | None = _checked(_seconds)
    nccl: tuple[tuple[str, NcclValue], ...] | None = _checked(_config)
    high_priority: bool | None = _checked(flag)
    sharp: bool | None = _checked(flag)
    share: bool | None = _checked(flag)
    overlap: str | None = _checked(_text)
    lazy: bool | None = _checked(flag)

    def __init__(self, **given: Unpack[GivenOptions]) -> None:
        values = vars(self)  # holds what is given alone; the rest stays at the default of its field
        for name, value in given.items():
            if name not in _CHECKS:
                raise UnknownArgument(name, _CHECKS, "Options")
            if value is not None:
                values[name] = _CHECKS[name](name, value)

    def over(self, inherited: Options) -> Options:
        """Return these options; those that are not set are taken from ``inherited``.

        >>> Options(timeout=1800, backend="gloo").over(Options(timeout=3600))
        Options(backend='gloo', timeout=1800.0)
        """
        ours, theirs = vars(self), vars(inherited)
        return Options(**{**theirs, **ours}) if ours and theirs else self if ours else inherited

    def effective(self) -> Options:
        """Set options that have their default value to None, so that equal behaviour is equal options."""
        defaults = {"share": True, "lazy": False, "high_priority": False}
        given = vars(self)
        kept = {name: value for name, value in given.items() if defaults.get(name) is not value}
        return Options(**kept) if len(kept) < len(given) else self

    def to_dict(self) -> GivenOptions:
        """Return the options that are set, as plain data, in the order of the fields."""
        given = {name: value for name in _CHECKS if (value := vars(self).get(name)) is not None and name != "nccl"}
        return cast(GivenOptions, given | ({"nccl": dict(self.nccl)} if self.nccl is not None else {}))

    def __repr__(self) -> str:
        return f"Options({', '.join(f'{name}={value!r}' for name, value in self.to_dict().items())})"

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.to_dict().items())


_CHECKS: Mapping[str, Callable[[str, object], object]] = {each.name: each.metadata["check"] for each in fields(Options)}
