"""The ``rankmesh`` command. Every subcommand is a typed function first; the rest reads words and prints.

```
app          finds the subcommands, and loads each when it is used
shell        errors and exit codes: one line on stderr, never a traceback
options      the arguments that subcommands have in common
outputs      files beside what is printed
console      data to stdout, words for people to stderr
columns      tables that fit the terminal
look, run, plan, weights, debug      the panels of the help: a file for each subcommand
```
"""

import time

__all__ = ["STARTED", "main"]

# When the command began: what it loads is a part of the time that it takes.
STARTED = time.perf_counter()


def main() -> None:
    """Run the command on ``sys.argv`` and exit with one of ``rankmesh.cli.shell``."""
    from rankmesh.cli.app import app

    app(prog_name="rankmesh")
