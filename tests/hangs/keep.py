"""Keeps recordings of hangs beside their tests: ``python -m tests.hangs.keep FOLDER [NAME ...]``.

Where ``HANGS_BACKEND`` is nccl they are those of NCCL.

What a recording says of the machine on which it was made is taken out: its name, and where its files lie.
"""

import gzip
import json
import os
import re
import shutil
import socket
import sys
from pathlib import Path

HERE = Path(__file__).parent
KEPT, KEPT_ON_NCCL = HERE / "recordings", HERE / "recordings_nccl"
_PLACES = (
    (re.compile(rf"{re.escape(str(HERE.parents[1]))}/\.venv/lib/python3\.\d+/"), "/usr/lib/python3/"),
    (re.compile(rf"{re.escape(str(HERE.parents[1]))}/"), ""),
    (re.compile(r"/[^\"\s]*/lib/python3\.\d+/"), "/usr/lib/python3/"),
    (re.compile(r"/[^\"\s]*/site/torch/"), "/usr/lib/python3/site-packages/torch/"),
    (re.compile(re.escape(socket.gethostname())), "host"),
)


def keep(folder, name):
    """Copy the recordings of one hang."""
    place = (KEPT_ON_NCCL if os.environ.get("HANGS_BACKEND") == "nccl" else KEPT) / name
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for file in sorted((Path(folder) / name).glob("rank*.json.gz")):
        text = gzip.decompress(file.read_bytes()).decode()
        for pattern, word in _PLACES:
            text = pattern.sub(word, text)
        json.loads(text)
        (place / file.name).write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    for chosen in sys.argv[2:] or sorted(path.name for path in Path(sys.argv[1]).iterdir()):
        keep(sys.argv[1], chosen)
