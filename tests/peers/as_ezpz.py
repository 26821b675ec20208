"""A plugin of pytest: where a test imports ``ezpz.tp``, it gets the drop-in."""

import sys
from types import ModuleType

import rankmesh.dialects.ezpz

_OURS = "rankmesh.dialects.ezpz"

for name in [name for name in sys.modules if name.startswith(_OURS)]:
    sys.modules["ezpz.tp" + name.removeprefix(_OURS)] = sys.modules[name]
sys.modules["ezpz"] = ModuleType("ezpz")
sys.modules["ezpz"].tp = rankmesh.dialects.ezpz
