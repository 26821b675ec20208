"""Time limits: how fast a machine is decides no test.

What is said at once is heard long before a limit of ``LONG``; what waits for its limit is heard before the next one.
"""

import time

# torch's store asks DNS for the name of each client: a lost answer costs 1 s then, not 5.
RESOLVER = {"RES_OPTIONS": "timeout:1 attempts:1"}

LONG = 200  # seconds
AT_ONCE = 60


def until(condition, seconds=LONG):
    """Wait until a condition holds, so long at the most; what it gave last."""
    end = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.01)
    return found
