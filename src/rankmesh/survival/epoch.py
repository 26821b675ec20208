"""Epochs: the parts of a job between two changes of its members; and who becomes a member with the next one.

>>> from rankmesh.survival.epoch import Epoch
>>> first = Epoch()
>>> first.after("members 0 and 1 go on"), first.after("members 0 and 2 go on")
(Epoch(1-677425d90672), Epoch(1-17385e8ed25d))
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256

from rankmesh.rendezvous import Outcome
from rankmesh.survival.conversation import Address, Message
from rankmesh.survival.members import Members

__all__ = ["Contact", "Epoch", "Newcomers", "addresses"]


@dataclass(frozen=True)
class Epoch:
    """An epoch; two of one ``number`` may follow where the store of a round is lost, so ``agreed`` tells them apart.

    As a string it is a name that no other epoch has, in the store and in messages.
    """

    number: int = 0
    agreed: str = ""

    def after(self, outcome: str) -> Epoch:
        """Return the next epoch, by the outcome of the round that ended this one."""
        return Epoch(self.number + 1, sha256(outcome.encode()).hexdigest()[:12])

    def __str__(self) -> str:
        return f"{self.number}-{self.agreed}" if self.agreed else f"{self.number}"

    def __repr__(self) -> str:
        return f"Epoch({self})"

    @classmethod
    def read(cls, name: object) -> Epoch:
        """Return the epoch that a message names. Raises ``ValueError`` for any other text."""
        number, _, agreed = str(name).partition("-")
        return cls(int(number), agreed)


# Members of which a process that joins learns the addresses.
_ASKED = 8


@dataclass(frozen=True, order=True)
class Contact:
    """The contact of a member: its host and address, and its ports there.

    Its heartbeat, the store that it serves, and its liveness port, 0 for none.
    """

    host: str
    address: str
    heartbeat: int
    store: int
    liveness: int

    @property
    def replies_at(self) -> Address:
        """The address at which it replies to messages."""
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
        """Return whether the plan may grow by them."""
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
    """Return the addresses at which the first of these reply to a process that joins."""
    known = [contacts[member] for member in members if member in contacts]
    return [(one.address, one.heartbeat) for one in known[:_ASKED]]
