"""Verification: live groups against the plan, by real collectives, on this job's ranks or on ranks started here.

```
verify      every group against the plan's arithmetic
work        what one rank does in a check, and its report
results     the result, from the reports of all ranks
check       the one way in, and how the ranks agree on the result
ranks       ranks on this machine, forked from this process
measure     latency and bandwidth of every kind of group
```
"""
