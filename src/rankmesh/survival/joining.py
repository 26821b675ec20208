"""Processes that join a job that runs: who has asked, and the reply to those that have become members."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rankmesh.rendezvous import Outcome
from rankmesh.survival.conversation import Address
from rankmesh.survival.epoch import Epoch
from rankmesh.survival.members import Members

__all__ = ["Contact", "Newcomers", "addresses"]

# Members of which a process that joins learns the addresses.
_ASKED = 8


@dataclass(frozen=True)
class Contact:
    """Where a member is reached: its host and address, and the ports of what it has there.

    Its heartbeat, the store that it serves, and its liveness port, 0 for none.
    """

    host: str
    address: str
    heartbeat: int
    store: int
    liveness: int

    @property
    def replies_at(self) -> Address:
        """Where it replies to messages."""
        return Address(self.address, self.heartbeat, self.liveness)

    @classmethod
    def read(cls, data: Any) -> Contact:
        """Return a contact from plain data."""
        ports = (int(data[name]) for name in ("heartbeat", "store", "liveness"))
        return cls(str(data["host"]), str(data["address"]), *ports)


class Newcomers:
    """The processes that have asked this member to become members, by where they are reached."""

    def __init__(self) -> None:
        self._asked: dict[str, Mapping[str, Any]] = {}
        self._welcomes: dict[str, dict[str, Any]] = {}

    def ask(self, contact: Mapping[str, Any]) -> dict[str, Any] | None:
        """Take note of a process that asks; its welcome, where the members have agreed on it."""
        contact = vars(Contact.read(contact))
        welcome = self._welcomes.get(_key(contact))
        if welcome is None:
            self._asked[_key(contact)] = contact
        return welcome

    @property
    def contacts(self) -> list[Mapping[str, Any]]:
        """Where those are reached that are not members yet."""
        return list(self._asked.values())

    def let_grow(self, members: Members) -> bool:
        """Whether the plan may grow by them."""
        number = len(self.contacts)
        return number > 0 and members.larger(number) is not None

    def welcome(self, outcome: Outcome, epoch: Epoch, history: Mapping[int, Members]) -> None:
        """Prepare the replies to those that this outcome of an epoch makes members."""
        shared = {
            "epoch": str(epoch),
            "outcome": outcome.text,
            "history": {str(number): of.data for number, of in history.items()},
        }
        for member, contact in outcome.value["joined"].items():
            self._welcomes[_key(contact)] = {**shared, "member": int(member)}
            self._asked.pop(_key(contact), None)


def _key(contact: Mapping[str, Any]) -> str:
    return json.dumps(contact, sort_keys=True)


def addresses(members: Iterable[int], reached_at: Mapping[int, Mapping[str, Any]]) -> list[tuple[str, int]]:
    """Where the first of these reply to a process that joins."""
    known = [reached_at[member] for member in members if member in reached_at]
    return [(one["address"], one["heartbeat"]) for one in known[:_ASKED]]
