r"""Training configs as plans: which lines of a file shape the layout, and the plan that they make.

A file is recognised by what it holds, not by its name. Scripts are parsed, never run. What is ambiguous, open or not
modelled is a ``PlanError`` with file and line.

>>> from rankmesh.readers import read_config
>>> config = read_config("parallelism:\n  dp: 2\n  tp: 4\n  pp: 2\n", "run.yaml")
>>> config.format, config.plan.mesh
('nanotron', Mesh(tp=4, cp=1, dp=2, pp=2, ep=1))
>>> print(config)
run.yaml: read as a nanotron config
run.yaml:2: parallelism.dp = 2 (dp)
run.yaml:3: parallelism.tp = 4 (tp)
run.yaml:4: parallelism.pp = 2 (pp)
"""

from typing import TYPE_CHECKING

from rankmesh.core.lazy import loader

if TYPE_CHECKING:
    from rankmesh.readers.config import Config, read_config
    from rankmesh.readers.launched import run_config

__all__ = ["Config", "read_config", "run_config"]

# Loaded only when a SPEC names a file.
__getattr__, __dir__ = loader(__name__, {"Config": "config", "read_config": "config", "run_config": "launched"})
