"""What a cycle of making and destroying leaves behind on a rank."""

import gc
import time

from rankmesh.groups import torch_private


def left_by(me, cycle, *, times=6):
    """What ``times`` more cycles add after three: descriptors, threads, registries; only what is not zero."""

    def measured(name):
        gc.collect()
        time.sleep(0.1)  # gloo's threads end on their own
        me.meet(name)
        seen = {**me.resources(), **torch_private.registries()}
        del seen["memory"]
        return seen

    for _ in range(3):
        cycle()
    before = measured("before the cycles")
    for _ in range(times):
        cycle()
    after = measured("after the cycles")
    return {name: after[name] - before[name] for name in after if after[name] != before[name]}
