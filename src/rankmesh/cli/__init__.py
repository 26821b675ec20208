"""The ``rankmesh`` command. Every subcommand is a typed function first; the rest reads words and prints.

```
app          the subcommands, registered
shell        errors and exit codes: one line on stderr, never a traceback
options      the arguments that subcommands have in common
complete     what the shell's completion offers, and how bash asks for it
outputs      files beside what is printed
console      data to stdout, words for people to stderr
columns      tables that fit the terminal
show, groups, explain, diff, explore, presets      one file each, which writes for the terminal too
```
"""

import os
import sys

from rankmesh.cli import started as started  # first: it takes the time

__all__ = ["main"]


def main() -> None:
    """Run the command on ``sys.argv`` and exit with one of ``rankmesh.cli.shell``."""
    from rankmesh.cli.app import app

    def run() -> None:
        app(prog_name="rankmesh")

    if os.environ.get("_RANKMESH_COMPLETE") == "complete_bash":
        from rankmesh.cli.complete import answered

        sys.stdout.write(answered(run))
    else:
        run()
