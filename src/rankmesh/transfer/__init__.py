"""Transfers: tensors under one layout turned into the same tensors under another.

```
planning    what moves, from whom to whom: a value like a plan, without torch
live        the moves run over a process group
```
"""

from rankmesh.transfer.planning.local import LocalMoves, Move
from rankmesh.transfer.planning.transfer import Transfer

__all__ = ["LocalMoves", "Move", "Transfer"]
