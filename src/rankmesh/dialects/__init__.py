"""Every system's interface over one plan: a table of names, loaded when it is asked for.

Each dialect is a module or package of its own, and knows no other.
"""

from __future__ import annotations

from rankmesh.extras import extra

with extra("torch"):
    import torch.distributed  # noqa: F401  - said here once, for every dialect
