"""Measurements side by side: ours and a peer, in one run, alternating, each on fresh processes.

```
suite        what is measured, one section after the other
contests     the same groups made twice: by rankmesh, and by a peer
live         real gloo ranks on this machine: time, descriptors, threads, store operations
dry          one rank of a large world on the backend "fake"
planning     plans of large worlds: no process group at all
getters      what one question to a live group costs
gpu          groups on NCCL, by ranks that share the GPUs that there are
compare      a comparison of layouts: time and memory of a two-layer model
processes    forked processes that report one line each and never outlive their time
results      medians, ratios, and their JSON
markdown     the same as a document
```

Peers are optional: one that is not installed is reported as such.
"""
