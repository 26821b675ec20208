"""What the command's exit status says.

>>> ExitCode(3).name, EXIT_CODES.splitlines()[0]
('BAD_SPEC', '  0  ok')
"""

from enum import IntEnum

__all__ = ["EXIT_CODES", "ExitCode"]


class ExitCode(IntEnum):
    """Exit statuses of ``rankmesh``; ``meaning`` is the line in its help."""

    meaning: str

    def __new__(cls, value: int, meaning: str) -> "ExitCode":
        """An integer with its meaning."""
        member = int.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member

    OK = 0, "ok"
    DIFFERENT = 1, "diff: the layouts differ, or by `compare` the numbers under them"
    USAGE = 2, "wrong usage, or a file that cannot be written"
    BAD_SPEC = 3, "a spec, layout or plan that is refused"
    UNPROVED = 4, "check: a group failed its proof"
    LOST_RANKS = 5, "check: ranks died or never arrived, or by `compare` the program failed"
    NO_JOB = 6, "what the launcher says contradicts itself, or lacks something"
    HUNG = 7, "doctor: ranks hang"
    INTERNAL = 70, "a defect of rankmesh itself; --debug shows where"
    INTERRUPTED = 130, "interrupted from the keyboard"
    BROKEN_PIPE = 141, "the reader of the output went away"


EXIT_CODES = "\n".join(f"{code.value:>3}  {code.meaning}" for code in ExitCode)
