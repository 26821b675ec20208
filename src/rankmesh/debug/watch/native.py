"""The stack of another process of this host with its native frames, by ``py-spy`` or ``pystack`` if one is installed.

```
holds_the_interpreter (gil.c:3)      the innermost frame: native, what the process does in it
load (train.py:31)                   the line of the program
```
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

__all__ = ["LIMIT", "native_stack"]

# Seconds that a tool may take: it stops the process meanwhile.
LIMIT = 3.0
_TOOLS = {"py-spy": ("dump", "--native", "--full-filenames", "--pid"), "pystack": ("remote", "--native")}


def native_stack(process: int) -> str:
    """Return what a tool prints of a process; empty if none is installed, or it may not look, or takes too long."""
    for name, options in _TOOLS.items():
        program = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
        if program is not None:
            with suppress(OSError, subprocess.SubprocessError):
                printed = subprocess.run(  # noqa: S603
                    (program, *options, str(process)), capture_output=True, timeout=LIMIT, check=True
                )
                return printed.stdout.decode(errors="replace")
    return ""
