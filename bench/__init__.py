"""Measurements side by side: ours and a peer, in one run, alternating, each on fresh processes.

```
__main__     the suite: live, dry, planning, getters, on the groups of contests
cluster      placement, and layouts: the communication of random layouts, on emulated clusters
gpu          groups on NCCL, by ranks that share the GPUs that there are
hangs        the doctor and the watch
published    predicted steps beside published ones
survive      what a commit and a lost rank cost
sync         versions of weights; transfers: between layouts
processes    forked processes that report once and never outlive their time
results      medians and ratios
report       the pages, from the recorded JSON
```

Peers are optional: one that is not installed is reported as such.
"""
