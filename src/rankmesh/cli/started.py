"""When the command began: what it loads is a part of the time that it takes."""

import time

__all__ = ["STARTED"]

STARTED = time.perf_counter()
