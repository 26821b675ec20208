"""Random configurations of one release of megatron-core beside the drop-in: ``python -m tests.peers.megatron_beside``.

Arguments: how many, and a seed. The release is the one that is on the path. Prints what was built and refused, and
whatever differed, as JSON.
"""

import importlib
import json
import random
import sys

from tests.peers import stand_ins

from rankmesh.dialects.megatron.releases import follow, parse

stand_ins.triton()
drawn = importlib.import_module("tests.dialects.megatron.test_differential")


def configuration(draw, takes):
    """A configuration of which the release takes every argument; one in two with weights in pieces."""
    size, arguments = drawn.configuration(draw)
    if "gtp_remat_size" in takes and draw.random() < 0.5:
        dense, expert = draw.choice(((2, 1), (1, 2), (2, 2), (2, 4), (3, 1)))
        arguments |= {"gtp_remat_size": dense, "expert_gtp_remat_size": expert}
        if draw.random() < 0.9:
            arguments["num_distributed_optimizer_instances"] = 1
        size *= draw.choice((dense, expert, dense * expert))
    return size, {name: value for name, value in arguments.items() if name in takes}


def main(count, seed):
    """Compare that many configurations."""
    version = importlib.import_module("megatron.core.package_info").__version__
    both = importlib.import_module("tests.dialects.megatron.peer")
    follow(both.ours, parse(version))
    draw = random.Random(seed)  # noqa: S311
    found = {"version": version, "built": 0, "refused": 0, "pieces": 0, "wrong": []}
    for _ in range(count):
        size, arguments = configuration(draw, both.TAKES)
        # Since 0.19 an order without tp is taken to have it, for the letters of gtp_remat; ours adds it as ever.
        built = drawn.compare(both, draw.randrange(size), size, arguments, found, unlike="'tp' is not in list")
        pieces = max(arguments.get("gtp_remat_size", 1), arguments.get("expert_gtp_remat_size", 1))
        found["pieces"] += built and pieces > 1
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
