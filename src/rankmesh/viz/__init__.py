"""Plans as pictures and pages: pure strings, no torch, no terminal.

```
overview        the facts that every way of showing a plan has in common
communicators   which groups use which communicator, for all ranks at once
sheet           where each rank of a mesh is drawn, and a mesh as text
svg             a mesh as a picture, coloured by the groups of a kind
explorer        one page to play with a layout, and to share it
```
"""

from rankmesh.viz.overview import Overview, overview
from rankmesh.viz.sheet import grid
from rankmesh.viz.svg import picture

__all__ = ["Overview", "grid", "overview", "picture"]
