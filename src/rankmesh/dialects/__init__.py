"""Every system's interface over one plan: a table of names, loaded when it is asked for."""

from __future__ import annotations
