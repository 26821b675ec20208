"""The outcome of a round: one value that every participant gets.

>>> outcome = Outcome("missing", ranks=(3,), missing=(3,), message="waited 2 s for rank 3")
>>> Outcome.read(outcome.text, "key") == outcome, outcome.agreed, Outcome().agreed
(True, False, True)
>>> [Outcome.read(Outcome(value=value).text, "key").value for value in (0, False, [], None)]
[0, False, [], None]
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from rankmesh.rendezvous.channel import foreign

__all__ = ["Outcome", "Reason", "parsed"]

Reason = Literal["agreed", "different", "missing", "lost", "failed", "withdrawn", "twice"]
_NAMES = ("ranks", "missing", "fields")


@dataclass(frozen=True)
class Outcome:
    """Why a round ended: ``agreed``, or what kept its participants from it.

    ``ranks`` are those to look at, ``missing`` those of them that are not there, ``fields`` what differs between
    proposals; ``message`` states it in words, and ``value`` is what the coordinator concluded, as JSON data.
    """

    reason: Reason = "agreed"
    ranks: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    fields: tuple[str, ...] = ()
    message: str = ""
    value: Any = None

    @property
    def agreed(self) -> bool:
        """Whether the participants go on."""
        return self.reason == "agreed"

    @property
    def text(self) -> str:
        """The outcome as JSON; what is left out has its default."""
        default = vars(Outcome())
        return json.dumps(
            {name: value for name, value in vars(self).items() if name == "reason" or value != default[name]}
        )

    @classmethod
    def read(cls, text: str, key: str) -> Outcome:
        """The outcome that a text states; ``AgreementError`` for a text that no coordinator has written."""
        data = parsed(text, key)
        lists = {name: data.get(name, []) for name in _NAMES}
        message, reason = data.get("message", ""), data.get("reason")
        right = reason in get_args(Reason) and isinstance(message, str)
        if not right or not all(isinstance(value, list) for value in lists.values()):
            raise foreign(key, f"{text[:60]!r}, which is no outcome of a round")
        ranks, missing, fields = (tuple(lists[name]) for name in _NAMES)
        return cls(cast(Reason, reason), ranks, missing, fields, message, data.get("value"))


def parsed(text: str, key: str) -> dict[str, Any]:
    """The JSON object that a text is; ``AgreementError`` for any other text."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        raise foreign(key, f"{text[:60]!r}, which is no JSON object")
    return data
