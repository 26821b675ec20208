"""The ``rankmesh`` command. Every subcommand is a typed function first; the rest reads words and prints.

```
app          the subcommands, registered
shell        errors and exit codes: one line on stderr, never a traceback
options      the arguments that subcommands have in common
complete     what the shell's completion offers
console      data to stdout, words for people to stderr
columns      tables that fit the terminal
show, groups, explain, diff, presets      one file each; show_text and diff_text write for the terminal
```
"""

__all__ = ["main"]


def main() -> None:
    """Run the command on ``sys.argv`` and exit with one of ``rankmesh.cli.exit_codes``."""
    from rankmesh.cli.app import app

    app(prog_name="rankmesh")
