"""One rank of two that joins the world by ``rm.init`` and sums: one line of JSON with what came of it.

``python joins.py TIMEOUT``, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
"""

import json
import sys
import time

import torch
import torch.distributed as dist

import rankmesh as rm


def join(timeout):
    """Join, and what came of it."""
    began = time.monotonic()
    try:
        with rm.init("gloo", timeout=timeout), rm.connect("dp=2") as groups:
            x = torch.ones(1)
            dist.all_reduce(x, group=groups["dp"].pg)
            result = {"sum": x.item()}
    except rm.ConnectError as error:
        result = {"message": str(error)}
    return {**result, "seconds": time.monotonic() - began}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(join(float(sys.argv[1]))))
