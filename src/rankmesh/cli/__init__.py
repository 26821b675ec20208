"""The ``rankmesh`` command. Every subcommand is a typed function first; the rest reads words and prints.

```
app          the subcommands, registered
shell        errors and exit codes: one line on stderr, never a traceback
options      the arguments that subcommands have in common
complete     what the shell's completion offers; bash_words: how bash asks for it
outputs      files beside what is printed
console      data to stdout, words for people to stderr
columns      tables that fit the terminal
show, groups, explain, diff, explore, presets      one file each; show_text and diff_text write for the terminal
```
"""

import os
import sys

from rankmesh.cli.bash_words import answered

# Imported before anything large, as it takes the time.
from rankmesh.cli.started import STARTED  # noqa: F401

__all__ = ["main"]


def main() -> None:
    """Run the command on ``sys.argv`` and exit with one of ``rankmesh.cli.exit_codes``."""
    from rankmesh.cli.app import app

    def run() -> None:
        app(prog_name="rankmesh")

    if os.environ.get("_RANKMESH_COMPLETE") == "complete_bash":
        sys.stdout.write(answered(run))
    else:
        run()
