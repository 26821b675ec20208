"""Layouts: how a framework shards every weight of a model.

```
layout      a model under one side: its shardings by checkpoint name, and views of its parameters
known       a table for common models, without any framework
sides       frameworks whose loaders are read, by rankmesh-engines or any entry point of rankmesh.sides
refusals    what a framework raises, as an error with a fix that helps: without torch
```
"""
