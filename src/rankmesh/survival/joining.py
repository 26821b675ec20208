"""Processes that join a job that runs: who has asked, and the reply to those that have become members."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rankmesh.rendezvous import Outcome
from rankmesh.survival.conversation import Address, Message
from rankmesh.survival.epoch import Epoch
from rankmesh.survival.members import Members

__all__ = ["Contact", "Newcomers", "addresses"]

# Members of which a process that joins learns the addresses.
_ASKED = 8


@dataclass(frozen=True, order=True)
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
    def read(cls, data: Mapping[str, str | int]) -> Contact:
        """Return a contact from plain data."""
        ports = (int(data[name]) for name in ("heartbeat", "store", "liveness"))
        return cls(str(data["host"]), str(data["address"]), *ports)


class Newcomers:
    """The processes that have asked this member to become members, by where they are reached."""

    def __init__(self) -> None:
        self.contacts: set[Contact] = set()  # of those that are not members yet
        self._welcomes: dict[Contact, Message] = {}

    def ask(self, contact: Contact) -> Message | None:
        """Take note of a process that asks; its welcome, where the members have agreed on it."""
        welcome = self._welcomes.get(contact)
        if welcome is None:
            self.contacts.add(contact)
        return welcome

    def let_grow(self, members: Members) -> bool:
        """Whether the plan may grow by them."""
        number = len(self.contacts)
        return number > 0 and members.larger(number) is not None

    def welcome(
        self, joined: Mapping[int, Contact], outcome: Outcome, epoch: Epoch, history: Mapping[int, Members]
    ) -> None:
        """Prepare the replies to those that the outcome of an epoch makes members."""
        shared = {
            "epoch": str(epoch),
            "outcome": outcome.text,
            "history": {str(number): of.data for number, of in history.items()},
        }
        for member, contact in joined.items():
            self._welcomes[contact] = {**shared, "member": member}
            self.contacts.discard(contact)


def addresses(members: Iterable[int], contacts: Mapping[int, Contact]) -> list[tuple[str, int]]:
    """Where the first of these reply to a process that joins."""
    known = [contacts[member] for member in members if member in contacts]
    return [(one.address, one.heartbeat) for one in known[:_ASKED]]
