"""Time limits of calls, where live groups look for them."""

from rankmesh.launch.limits import time_limit

__all__ = ["time_limit"]
