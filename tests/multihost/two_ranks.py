"""Two ranks of a host, each a fork that writes one line of JSON: ``python two_ranks.py WHAT FIRST``, of 4 ranks.

``prove`` connects and proves every group; ``meet`` connects with a timeout of 3 s; ``sleep`` never connects.
"""

import json
import os
import sys
import time
from datetime import timedelta

import torch.distributed as dist

import rankmesh as rm
from rankmesh.debug.verification.verify import verify

PLAN = rm.Plan(rm.Mesh(dp=2, pp=2), [rm.GroupSpec("dp"), rm.GroupSpec("pp")])


def _verify():
    with rm.connect(PLAN, timeout=10) as groups:
        result = {"proved": [verified.name for verified in verify(groups)]}
        dist.barrier()
    return result


def _meet():
    began = time.time()
    try:
        rm.connect(PLAN, timeout=3).close()
    except rm.AgreementError as error:
        return {"missing": list(error.missing), "message": str(error), "began": began, "ended": time.time()}
    return {}


def _sleep():
    time.sleep(60)
    return {}


def _rank(what, rank):
    dist.init_process_group("gloo", rank=rank, world_size=4, timeout=timedelta(seconds=20))
    result = {"prove": _verify, "meet": _meet, "sleep": _sleep}[what]()
    os.write(1, (json.dumps({"rank": rank, **result}) + "\n").encode())
    # Rank 0 serves the store: it is the last to leave.
    time.sleep(1 if rank == 0 else 0)
    os._exit(0)


if __name__ == "__main__":
    first = int(sys.argv[2])
    for number in (first, first + 1):
        if os.fork() == 0:
            _rank(sys.argv[1], number)
    for _ in range(2):
        os.wait()
