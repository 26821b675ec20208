"""The key of a job: with it processes show each other that they belong to the same job.

```
RANKMESH_JOB_KEY=...           the launcher hands the key to every process
RANKMESH_JOB_KEY_FILE=path     a file that contains it, which only its owner can read
neither                        the first rank makes a key; the others receive it through the launcher's store
```

>>> key = JobKey("an example of 32 characters or more")
>>> tag = key.tag(b"epoch 3 has ended")
>>> key.is_tag(tag, b"epoch 3 has ended"), key.is_tag(tag, b"epoch 4 has ended")
(True, False)
>>> key
JobKey('4a9...')
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from rankmesh.errors import ConnectError, quoted

__all__ = ["FILE", "VARIABLE", "JobKey"]

VARIABLE, FILE = "RANKMESH_JOB_KEY", "RANKMESH_JOB_KEY_FILE"
# Characters of a key: 256 random bits are 64 hexadecimal digits, or 43 of base64.
_SHORTEST, _LONGEST = 32, 4096
_ADVICE = 'make one with: python -c "import secrets; print(secrets.token_hex())"'


@dataclass(frozen=True)
class JobKey:
    """A secret that the processes of one job share.

    ``text`` has 32 characters or more; 64 random hexadecimal digits are 256 bits. Raises ``ConnectError`` for a text
    that is too short or too long.
    """

    text: str = field(repr=False)

    def __post_init__(self) -> None:
        if not _SHORTEST <= len(self.text) <= _LONGEST:
            raise ConnectError(
                f"a job key of {len(self.text)} characters was given; a key has {_SHORTEST} to {_LONGEST}; {_ADVICE}",
                length=len(self.text),
            )

    @classmethod
    def new(cls) -> JobKey:
        """Return a key of 256 random bits."""
        return cls(secrets.token_hex())

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> JobKey | None:
        """Return the key that the environment names, None if it names none.

        Raises ``ConnectError`` if both variables are set, or the file is not a private file of this user.
        """
        text, file = environment.get(VARIABLE, "").strip(), environment.get(FILE, "").strip()
        if text and file:
            raise ConnectError(f"{VARIABLE} and {FILE} are both set; set one of them")
        if file:
            text = _read(Path(file))
        return cls(text) if text or file else None

    def of_use(self, purpose: str) -> JobKey:
        """Return the key for one purpose, such as ``"heartbeat"``: tags of one purpose are invalid for another."""
        return JobKey(self.tag(purpose.encode()))

    @property
    def fingerprint(self) -> str:
        """Twelve digits that are equal for equal keys and do not reveal the key."""
        return self.tag(b"fingerprint")[:12]

    def tag(self, *parts: bytes) -> str:
        """Return the message authentication code of these bytes: HMAC-SHA256, 64 hexadecimal digits.

        The parts are joined without a separator: all but one of them have a fixed length.
        """
        return hmac.digest(self.text.encode(), b"".join(parts), sha256).hex()

    def is_tag(self, tag: str, *parts: bytes) -> bool:
        """Return whether ``tag`` authenticates these bytes, in a time that does not depend on the tag."""
        return hmac.compare_digest(self.tag(*parts).encode(), tag.encode(errors="replace"))

    def __repr__(self) -> str:
        return f"JobKey('{self.fingerprint[:3]}...')"


def _read(path: Path) -> str:
    """Return the text of a key file: a regular file of this user that nobody else can read."""
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ConnectError(f"{FILE}={quoted(str(path))} cannot be read ({error.strerror}); {_ADVICE}") from error
    with os.fdopen(opened, "rb") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o077:
            raise ConnectError(
                f"{FILE}={quoted(str(path))} belongs to user {about.st_uid}, with mode {stat.filemode(about.st_mode)}; "
                f"a key file is a regular file of user {os.geteuid()} that nobody else can read; chmod 600 it",
                file=str(path),
            )
        return file.read(_LONGEST + 1).decode(errors="replace").strip()
