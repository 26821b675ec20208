"""Layouts: how a framework shards every weight of a model.

```
layout      a model under one side: its shardings by checkpoint name, and views of its parameters
known       a table for common models, without any framework
sides       frameworks whose loaders are read: those of rankmesh-engines, and of any entry point rankmesh.sides
refusals    what a framework raises, as an error with a fix that helps: without torch
```
"""
