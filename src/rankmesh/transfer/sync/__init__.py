"""Sync: a trainer's weights, brought to inference engines version by version.

```
session   rm.Sync: publish, receive, and how each side agrees
layouts   both layouts as one transfer
delta     what a version has changed
link      what a sync needs of a folder or a store; one side of it, and its weights
stored    versions as files that both sides share: shared memory on one host, a folder
direct    versions over a process group for each engine
```
"""

from rankmesh.transfer.sync.session import Published, Received, Sync

__all__ = ["Published", "Received", "Sync"]
