"""Layouts: how a framework shards every weight of a model, read from its own construction and its own loader.

```
strided     copies between memories, as strides: without torch
trace       a loader run on tensors without storage; where each element of its parameters came from    torch
inference   the boxes of all ranks as one sharding, or why there is none: without torch
refusals    what a framework raises, as an error with a fix that helps: without torch
layout      a model under one side: its shardings by checkpoint name, and views of its parameters
sides       the frameworks whose layouts are read: those of rankmesh-engines, and of any entry point rankmesh.sides
```
"""
