"""What cycles of making and destroying leave behind on a rank."""

import gc
import time

from rankmesh.backend.registries import registries


def left_by(me, cycle, *, times=3):
    """What ``times`` more cycles add after two: descriptors, threads, registries; only what has grown."""

    def measured():
        gc.collect()
        seen = {**me.resources(), **registries()}
        del seen["memory"]
        return seen

    def grown(before):
        return {name: count - before[name] for name, count in measured().items() if count > before[name]}

    for _ in range(2):
        cycle()
    me.meet("before the cycles")
    before = measured()
    for _ in range(times):
        cycle()
    me.meet("after the cycles")
    # Gloo's threads and sockets end on their own, a little later; what leaks stays.
    end = time.monotonic() + 3
    while set(grown(before)) & {"descriptors", "threads"} and time.monotonic() < end:
        time.sleep(0.05)
    return grown(before)
