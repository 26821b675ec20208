"""The ``rankmesh`` command. Every subcommand is a typed function first; the rest reads words and prints.

```
app          the subcommands, registered
shell        errors and exit codes: one line on stderr, never a traceback
options      the arguments that subcommands have in common
complete     what the shell's completion offers
outputs      files beside what is printed
console      data to stdout, words for people to stderr
columns      tables that fit the terminal
show, groups, explain, diff, explore, presets      one file each, which writes for the terminal too
```
"""

from rankmesh.cli import started as started  # first: it takes the time

__all__ = ["main"]


def main() -> None:
    """Run the command on ``sys.argv`` and exit with one of ``rankmesh.cli.shell``."""
    from rankmesh.cli.app import app

    app(prog_name="rankmesh")
