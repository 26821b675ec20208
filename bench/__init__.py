"""Measurements side by side: ours and a peer, in one run, alternating, each on fresh processes.

```
__main__     the suite: live, worlds (dry, planning), getters, on the groups of contests
cluster      placement, and layouts: the communication of random layouts, on emulated clusters
gpu          groups on NCCL, by ranks that share the GPUs that there are
guard, init  what a guard costs, and rm.init
hangs        the doctor and the watch (watched)
published    predicted steps beside published ones
slow         what it costs to look for slow ranks
survive      what a commit, keeping state (hold), a lost rank (lost) and another layout (relayout) cost
sync         versions of weights; transfers: between layouts
processes    ranks: forked, or by torchrun; they never outlive their time
results      rounds in turn, medians and ratios
report       options, the recorded JSON, and the pages that are made of it
```

Peers are optional: one that is not installed is reported as such.
"""
