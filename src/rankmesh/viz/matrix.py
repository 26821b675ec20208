"""Who sends what to whom, as a picture: ranks that send from above to below, ranks that receive from left to right.

```
         0    1    2    3
    0  1.0       0.5              a cell: what the rank on its left sends to the rank above it; the darker, the more
    1       1.0       0.5
```

>>> import numpy as np
>>> text = matrix(np.array([[0, 3], [1, 0]]), "two ranks")
>>> text.startswith("<svg"), text.count("<rect"), "rank 0 to rank 1: 3 bytes" in text
(True, 3, True)
"""

from __future__ import annotations

from xml.etree.ElementTree import Element, tostring

import numpy as np

from rankmesh.core.strided import IntArray
from rankmesh.errors import LayoutError
from rankmesh.viz.panel import GAP, document, put

__all__ = ["LIMIT", "matrix"]

LIMIT = 256
_LEFT, _TOP = 48, 64
_WIDTH = 900


def matrix(moved: IntArray, title: str) -> str:
    """SVG text of bytes by sending rank (row) and receiving rank (column).

    Raises ``LayoutError`` for more than 256 ranks, whose cells could not be read.
    """
    rows, columns = moved.shape
    if max(rows, columns) > LIMIT:
        raise LayoutError(
            f"the transfer has {max(rows, columns)} ranks, but a picture shows up to {LIMIT}; draw a smaller world of "
            "the same axes, such as fewer data-parallel ranks",
            size=max(rows, columns),
            limit=LIMIT,
        )
    cell = max(4, min(32, _WIDTH // max(columns, 1)))
    width, height = max(_LEFT + columns * cell + GAP, 420), _TOP + rows * cell + GAP
    root = document(width, height, title)
    put(root, "text", title, x=GAP, y=GAP + 4, **{"class": "title"})
    _ticks(root, rows, columns, cell)
    most = max(int(moved.max(initial=0)), 1)
    for row, column in np.argwhere(moved).tolist():
        value = int(moved[row, column])
        shade = round(225 - 190 * value / most)
        drawn = put(
            root, "rect", x=_LEFT + column * cell, y=_TOP + row * cell, width=cell - 1, height=cell - 1,
            fill=f"rgb({shade},{min(shade + 30, 255)},255)",
        )  # fmt: skip
        put(drawn, "title", f"rank {row} to rank {column}: {value:,} bytes")
    return tostring(root, encoding="unicode")


def _ticks(root: Element, rows: int, columns: int, cell: int) -> None:
    step = max(1, -(-28 // cell))
    for row in range(0, rows, step):
        put(root, "text", str(row), x=_LEFT - 6, y=_TOP + row * cell + cell // 2 + 4, **{"class": "label end"})
    for column in range(0, columns, step):
        put(root, "text", str(column), x=_LEFT + column * cell + 2, y=_TOP - 6, **{"class": "label"})
