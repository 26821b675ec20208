"""Every system's interface over one plan: a table of names, loaded when it is asked for.

Each dialect is a module or package of its own, and knows no other.
"""

from __future__ import annotations
