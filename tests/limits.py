"""Time limits: how fast a machine is decides no test.

What is said at once is heard long before a limit of ``LONG``; what waits for its limit is heard before the next one.
"""

LONG = 60  # seconds
AT_ONCE = 15
