"""How much work something is, in calls or in words with a store: the same on every machine, where seconds are not."""

import os
import signal
import sys
from collections import Counter


def calls(work):
    """The calls of Python's and of C's functions that this takes."""
    counted = 0

    def count(_, event, __):
        nonlocal counted
        counted += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return counted


class Counting:
    """A store that counts what is asked of it."""

    def __init__(self, store):
        self._store, self.calls = store, Counter()

    def __getattr__(self, name):
        method = getattr(self._store, name)

        def counted(*args):
            self.calls[name] += 1
            return method(*args)

        return counted


class Killing:
    """A store that ends its process after the nth operation."""

    def __init__(self, store, at):
        self._store, self._left = store, at

    def __getattr__(self, name):
        method = getattr(self._store, name)

        def counted(*args):
            # A rank that waits asks again and again: how often is a matter of the machine.
            self._left -= name != "check"
            result = method(*args)
            if self._left == 0 and name != "check":
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return counted
