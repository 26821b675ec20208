"""Questions to a running job, and requests: one message to a member, from a process that has the job's key."""

from __future__ import annotations

import socket

from rankmesh.errors import ConnectError, PlanError, quoted
from rankmesh.launch.address import family_of, host_and_port
from rankmesh.launch.job_key import FILE, VARIABLE, JobKey
from rankmesh.survival.conversation import Address
from rankmesh.survival.epoch import Epoch
from rankmesh.survival.heartbeat import Message, exchange
from rankmesh.survival.members import Sizes, plan_of

__all__ = ["address_of", "request_layout", "status"]

# Seconds in which a member replies.
_SECONDS = 5.0


def address_of(text: str, what: str, key: JobKey | None) -> tuple[Address, JobKey]:
    """Return the address that a text names, and the key; raise ``ConnectError`` if either is missing."""
    place = host_and_port(text)
    try:
        if place is None:
            raise ValueError
        socket.getaddrinfo(*place, family_of(place[0]), socket.SOCK_STREAM)
    except (ValueError, OSError) as error:
        why = f" ({error.strerror})" if isinstance(error, OSError) else ""
        raise ConnectError(
            f"{what}{quoted(text)} is not an address of a member{why}; give what job.address is on a rank, such as "
            "'10.0.0.1:40123'",
            address=text,
        ) from None
    if key is None:
        raise ConnectError(
            f"{what}{quoted(text)} needs the key of that job, and {VARIABLE} is not set; set it to what job.key is on "
            f"one of its ranks, or {FILE} to a file that contains it",
            address=text,
        )
    return Address(*place), key


def status(address: str) -> Message:
    """Return a member's status: epoch, plan, step, members, spares, and the last change with its seconds."""
    reply = _reply(address, {"what": "status"})
    return {**reply, "epoch": Epoch.read(reply["epoch"]).number}


def request_layout(address: str, layout: str) -> str:
    """Have a job change its layout after the next commit; return what follows in words.

    Raises ``PlanError`` if the job refuses the layout.
    """
    before = status(address)
    plan = plan_of(layout, len(before["members"]) - len(before["spares"]))
    reply = _reply(address, {"what": "relayout", "sizes": Sizes.of(layout, plan, None).data})
    if reply["refused"]:
        raise PlanError(f"the job refuses {quoted(layout)}: {reply['refused']}", layout=layout)
    return str(reply["follows"])


def _reply(address: str, message: Message) -> Message:
    at, key = address_of(address, "", JobKey.of_environment())
    reply = exchange({0: at}, key.of_use("heartbeat"), message, _SECONDS)[0]
    if not isinstance(reply, dict) or ("plan" not in reply and "refused" not in reply):
        raise ConnectError(
            f"no member of a job with this {VARIABLE} replies at {address}; give what job.address is on a rank that "
            f"lives, and {VARIABLE} what job.key is there",
            address=address,
        )
    return reply
