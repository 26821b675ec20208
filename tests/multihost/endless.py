"""``rankmesh check`` that proves its pp groups until something breaks: ``torchrun ... endless.py SPEC ...``."""

import sys

from rankmesh.cli import main
from rankmesh.debug.verification import diary as check
from rankmesh.debug.verification.prove import prove_group

prove = check.prove


def _endless(groups, device):
    yield next(prove(groups, device))
    prove_group(groups["pp"], device)
    sys.stderr.write(f"rank {groups.rank} is proving\n")
    sys.stderr.flush()
    while True:
        prove_group(groups["pp"], device)


if __name__ == "__main__":
    check.prove = _endless
    sys.argv = ["rankmesh", "check", *sys.argv[1:]]
    main()
