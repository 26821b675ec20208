"""``RANKMESH=watch`` in the environment of a job: the watch of rankmesh, without a change of code.

torch calls ``load`` when it is imported: it is an entry point of the group ``torch.backends``. Without the variable it
returns at once, and nothing else of rankmesh is imported. With it, a process is watched from ``init_process_group`` to
``destroy_process_group``, whichever framework calls them. Nothing here ends a program or keeps it from starting.
"""

from __future__ import annotations

import functools
import os
import sys

TYPE_CHECKING = False  # the module typing would take longer to import than all of this
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from rankmesh.debug.watch import Watch
    from rankmesh.guard.background import BackgroundGuard
    from rankmesh.guard.observe import Program

__all__ = ["load"]


def load() -> None:
    """Have this process's worlds watched if the environment asks for it."""
    if not (os.environ.get("RANKMESH") or os.environ.get("RANKMESH_RECORD")):
        return
    import torch.distributed as dist

    if not dist.is_available():
        return
    watches: list[Watch | BackgroundGuard] = []
    if "guard=" in os.environ.get("RANKMESH", ""):
        _safely(_observe)

    def joins(join: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(join)
        def init_process_group(*args: Any, **options: Any) -> Any:
            _safely(_prepare)
            joined = join(*args, **options)
            _safely(_start, watches)
            return joined

        return init_process_group

    def leaves(leave: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(leave)
        def destroy_process_group(group: Any = None) -> Any:
            if group is None or group is dist.group.WORLD:
                while watches:
                    _safely(watches.pop().close)
            return leave(group)

        return destroy_process_group

    for name, around in (("init_process_group", joins), ("destroy_process_group", leaves)):
        original = getattr(dist, name)
        watched = around(original)
        for module in ("", ".distributed_c10d", ".device_mesh"):
            place = sys.modules.get(f"torch.distributed{module}")
            if getattr(place, name, None) is original:
                setattr(place, name, watched)


# What the program trains, from its first module on.
_programs: list[Program] = []


def _observe() -> None:
    from rankmesh.guard.observe import Program

    _programs.append(Program())


def _prepare() -> None:
    from rankmesh.debug.watch.recorder import prepare

    prepare()


def _start(watches: list[Watch | BackgroundGuard]) -> None:
    from rankmesh.debug.watch.setting import setting
    from rankmesh.debug.watch.switch import ACTIONS, start

    watches += start(os.environ)
    wanted = setting(os.environ, []) if watches else None
    if wanted is not None and wanted.guard and _programs:
        from rankmesh.guard.background import BackgroundGuard

        watches.append(BackgroundGuard(_programs[0], wanted.guard, ACTIONS[wanted.then], wanted.folder.absolute()))


def _safely(step: Callable[..., object], *args: object) -> None:
    try:
        step(*args)
    except Exception as error:  # noqa: BLE001  - a job runs on without its watch
        print(f"rankmesh: this process is not watched: {error}", file=sys.stderr)  # noqa: T201
