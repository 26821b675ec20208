"""Every system's interface over one plan: a table of names, loaded when it is asked for.

Each dialect is one module or package, and imports no other.
"""

from __future__ import annotations
