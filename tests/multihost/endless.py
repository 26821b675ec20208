"""``rankmesh check`` that proves its pp groups until something breaks: ``torchrun ... endless.py SPEC ...``."""

import sys

from rankmesh.cli import main
from rankmesh.debug.verification import work as check
from rankmesh.debug.verification.verify import verify_group

verify = check.verify


def _endless(groups, device):
    yield next(verify(groups, device))
    verify_group(groups["pp"], device)
    sys.stderr.write(f"rank {groups.rank} is proving\n")
    sys.stderr.flush()
    while True:
        verify_group(groups["pp"], device)


if __name__ == "__main__":
    check.verify = _endless
    sys.argv = ["rankmesh", "check", *sys.argv[1:]]
    main()
