"""Layouts: axes, strides, meshes, views, jobs. numpy only.

```
strided   the (size, stride) patterns that everything is made of
axes      names, sizes and order strings
span      the ranks of a mesh and their order
mesh      coordinates, groups, views, splits
views     another factorisation of the same ranks
groups    one group, and all groups of one kind
picks     a choice of positions inside each group
job       several meshes in one world
sharding  how one tensor lies on a mesh: cells, spread over ranks; boxes
```
"""

from rankmesh.layout.groups import Group, Groups
from rankmesh.layout.job import Job
from rankmesh.layout.mesh import Mesh
from rankmesh.layout.picks import Pick, ends, first, last
from rankmesh.layout.sharding import Shard, Sharding

__all__ = ["Group", "Groups", "Job", "Mesh", "Pick", "Shard", "Sharding", "ends", "first", "last"]
