"""Proof: live groups proved by real collectives, by the ranks of this job or by ranks started on this machine.

```
prove     every group against the plan's arithmetic
results   what each rank did, and the outcome over all of them
check     the one way in: the ranks of this job, or of this machine
in_job    the ranks that a launcher started
here      ranks on this machine, forked from this process
```
"""
