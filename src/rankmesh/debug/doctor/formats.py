"""From a file to plain data: JSON or a pickle, gzip or not. No code of a file is ever run.

```
first bytes    1f 8b      gzip: what is inside, up to a limit
               80         a pickle: dicts, lists, tuples, texts, numbers; any class in it is refused
               {          JSON
```

A pickle names classes and functions by ``GLOBAL`` and its kin; all of them go through ``find_class``, which refuses.
What remains can still be large or slow to build, so pickles are read in processes with limits (``readers.py``).
"""

from __future__ import annotations

import gzip
import io
import json
import pickle
import zlib
from pathlib import Path
from typing import Any, BinaryIO

from rankmesh.core.documents import Unreadable, open_regular
from rankmesh.errors import RecordingError, first_line

__all__ = ["LIMIT", "document", "parsed", "unpacked"]

# Bytes of one recording, unpacked: 2,000 calls with frames take about one million.
LIMIT = 128 * 2**20


class _Plain(pickle.Unpickler):
    """Unpickles plain data; a pickle that names anything that could run is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {str(module)[:60]}.{str(name)[:60]}, and only plain data is read")

    def persistent_load(self, pid: object) -> Any:
        raise pickle.UnpicklingError("it asks for an object from outside, and only plain data is read")


def document(path: Path) -> dict[str, Any]:
    """Return the plain data of one file; ``RecordingError``, which names the file, for anything else."""
    try:
        with open_regular(path) as file:
            found = parsed(unpacked(file))
    except (Unreadable, RecordingError) as error:
        raise _bad(path, str(error), None) from error
    except (OSError, EOFError, zlib.error) as error:
        raise _bad(path, "cannot be read", error) from error
    except RecursionError as error:
        raise _bad(path, "is nested too deeply", error) from error
    except MemoryError as error:
        raise _bad(path, "takes too much memory", error) from error
    except Exception as error:  # a hostile pickle raises whatever its opcodes lead to
        raise _bad(path, "is truncated or no recording", error) from error
    if not isinstance(found, dict):
        raise _bad(path, "holds no recording", None)
    return found


def unpacked(file: BinaryIO) -> bytes:
    """Return what a file holds, without gzip; no more than the limit is ever unpacked."""
    packed = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    data = gzip.GzipFile(fileobj=file).read(LIMIT + 1) if packed else file.read(LIMIT + 1)
    if not data:
        raise RecordingError("is empty")
    if len(data) > LIMIT:
        raise RecordingError(f"is larger than {LIMIT >> 20} MiB")
    return data


def parsed(data: bytes) -> object:
    """Return the plain data of a text or a pickle; raise ``pickle.UnpicklingError`` if it asks for more."""
    if data[:1] == b"\x80":
        # Buffered, or each opcode would be a read of its own.
        return _Plain(io.BufferedReader(io.BytesIO(data))).load()
    if not data.lstrip()[:1] == b"{":
        raise RecordingError("is neither JSON nor a pickle")
    return json.loads(data)


def _bad(path: Path, what: str, error: Exception | None) -> RecordingError:
    reason = "" if error is None else f" ({first_line(error)})"
    return RecordingError(
        f"{path.name} {what}{reason}: skipped; a recording is what torch's flight recorder or rankmesh wrote",
        path=str(path),
    )
