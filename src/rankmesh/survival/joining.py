"""Processes that join a job that runs: who has asked, and the reply to those that have become members."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from rankmesh.rendezvous import Outcome
from rankmesh.survival.epoch import Epoch
from rankmesh.survival.heartbeat import Message
from rankmesh.survival.members import Members
from rankmesh.survival.peers import Contact

__all__ = ["Newcomers", "addresses", "history_of"]

# Members of which a process that joins learns the addresses.
_ASKED = 8


class Newcomers:
    """The processes that have asked this member to become members, by where they are reached."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: dict[str, Mapping[str, Any]] = {}
        self._welcomes: dict[str, Message] = {}

    def ask(self, contact: Mapping[str, Any]) -> Message | None:
        """Take note of a process that asks; its welcome, where the members have agreed on it."""
        contact = vars(Contact.read(contact))
        with self._lock:
            welcome = self._welcomes.get(_key(contact))
            if welcome is None:
                self._asked[_key(contact)] = contact
        return welcome

    @property
    def contacts(self) -> list[Mapping[str, Any]]:
        """Where those are reached that are no members yet."""
        with self._lock:
            return list(self._asked.values())

    def let_grow(self, members: Members) -> bool:
        """Whether the plan may grow by them."""
        number = len(self.contacts)
        return number > 0 and members.larger(number) is not None

    def welcome(
        self,
        outcome: Outcome,
        epoch: Epoch,
        history: Mapping[int, Members],
        world_size: int,
        reached_at: Mapping[int, Mapping[str, Any]],
    ) -> None:
        """Prepare the replies to those that this outcome of an epoch makes members."""
        shared = {
            "epoch": str(epoch),
            "outcome": outcome.text,
            "history": {
                str(number): (of.sizes.replicas(of.plan), of.ranks, of.spares, of.started)
                for number, of in history.items()
            },
            "world_size": world_size,
            "contacts": {str(member): contact for member, contact in reached_at.items()},
        }
        with self._lock:
            for member, contact in outcome.value.get("joined", {}).items():
                self._welcomes[_key(contact)] = {**shared, "member": int(member)}
                self._asked.pop(_key(contact), None)


def _key(contact: Mapping[str, Any]) -> str:
    return json.dumps(contact, sort_keys=True)


def history_of(welcome: Message, first: Members) -> dict[int, Members]:
    """The members of each epoch of which there may be snapshots, as a welcome says."""
    return {
        int(epoch): Members(first.sizes, first.sizes.plan(replicas), tuple(ranks), tuple(spares), started, first.hosts)
        for epoch, (replicas, ranks, spares, started) in welcome["history"].items()
    }


def addresses(members: Iterable[int], reached_at: Mapping[int, Mapping[str, Any]]) -> list[tuple[str, int]]:
    """Where the first of these reply to a process that joins."""
    known = [reached_at[member] for member in members if member in reached_at]
    return [(one["address"], one["heartbeat"]) for one in known[:_ASKED]]
