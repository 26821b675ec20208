"""Keeps recordings of hangs beside their tests: ``python -m tests.hangs.keep FOLDER [NAME ...]``.

Where ``HANGS_BACKEND`` is nccl they are those of NCCL; those that torch wrote itself, after a timeout, lie apart.

What a recording says of the machine on which it was made is taken out: its name, and where its files lie.
"""

import gzip
import json
import os
import pickle
import re
import shutil
import socket
import sys
from pathlib import Path

HERE = Path(__file__).parent
KEPT, KEPT_ON_NCCL, KEPT_TIMED_OUT = (HERE / f"recordings{kind}" for kind in ("", "_nccl", "_timed_out"))
_PLACES = (
    (re.compile(rf"{re.escape(str(HERE.parents[1]))}/\.venv/lib/python3\.\d+/"), "/usr/lib/python3/"),
    (re.compile(rf"{re.escape(str(HERE.parents[1]))}/"), ""),
    (re.compile(r"/[^\"\s]*/lib/python3\.\d+/"), "/usr/lib/python3/"),
    (re.compile(r"/[^\"\s]*/site/torch/"), "/usr/lib/python3/site-packages/torch/"),
    (re.compile(re.escape(socket.gethostname())), "host"),
)


def keep(folder, name):
    """Copy the recordings of one hang."""
    files = sorted((Path(folder) / name).glob("rank*.json.gz"))
    timed_out = sorted((Path(folder) / name).glob("trace_rank_*"))
    kept = KEPT_TIMED_OUT if timed_out else KEPT_ON_NCCL if os.environ.get("HANGS_BACKEND") == "nccl" else KEPT
    place = kept / name
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for file in files:
        text = clean(gzip.decompress(file.read_bytes()).decode())
        json.loads(text)
        (place / file.name).write_bytes(gzip.compress(text.encode(), mtime=0))
    for file in timed_out:
        content = pickle.dumps(clean(pickle.loads(file.read_bytes())), protocol=2)  # noqa: S301  - of our own run
        (place / f"{file.name}.gz").write_bytes(gzip.compress(content, mtime=0))


def clean(data):
    """The same data without what its texts say of this machine."""
    if isinstance(data, dict):
        return {clean(key): clean(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return type(data)(map(clean, data))
    if isinstance(data, str):
        for pattern, token in _PLACES:
            data = pattern.sub(token, data)
    return data


if __name__ == "__main__":
    for chosen in sys.argv[2:] or sorted(path.name for path in Path(sys.argv[1]).iterdir()):
        keep(sys.argv[1], chosen)
