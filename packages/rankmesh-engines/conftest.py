"""Modules that import an engine are not read for examples."""

from pathlib import Path

READ = {"inference.py", "loaders.py", "stand_ins.py", "strided.py", "trace.py"}
collect_ignore = [str(path) for path in Path(__file__).parent.glob("src/*/*.py") if path.name not in READ]
