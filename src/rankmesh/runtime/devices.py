"""Devices: what each rank could use, and what all of them therefore do.

```
every rank sees a GPU of its own      nccl, each on its own        (its only one, or the one of its local rank)
NCCL_MULTI_RANK_GPU_ENABLE=1          nccl, ranks share GPUs       (NCCL 2.30 and later: each rank's share is its own)
one of them does not                  gloo, all on the CPU         never nccl on some and gloo on others
nccl was asked for, and one cannot    refused on every rank, with the ranks that cannot and the reason
```

Before there is a world, all ranks of a job arrive with their capabilities, and one decides for all:

```
rank 0  ── capabilities ───────────────────┐ wait
rank 1  ── capabilities ───────────────────┤ wait       decision: the backend of all, or why nobody goes on
rank 2  ── capabilities: complete ── decide
```
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from ipaddress import ip_address
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # absent from its __all__

from rankmesh.core.local_ranks import LocalRank, contradictions
from rankmesh.errors import AgreementError, ConnectError, StoreLost, first_of, in_words
from rankmesh.launch.address import addresses_of, is_local
from rankmesh.launch.started import Launch
from rankmesh.rendezvous import Arrivals, Codec, Outcome, Proposal, Round, StoreChannel
from rankmesh.rendezvous.gather import or_missing
from rankmesh.rendezvous.step import Step, WaitPolicy

__all__ = ["BackendDecision", "Capabilities", "capabilities", "choose", "decide", "pick", "ranks_share"]


# Seconds that ranks wait for others once two of them expect worlds of another size, or ask for another backend.
_ODD = 1.0
# Seconds after which a rank that waits looks whether rank 0, which mostly serves the store, is there.
_LOOK = 0.5


@dataclass(frozen=True)
class Capabilities:
    """Capabilities of one rank: the device that it would use, as its index and its identity, or why it has none.

    ``loopback`` is the address at which gloo would listen, where only ranks of the same ``network`` can reach it.
    ``local_rank`` and ``local_size`` are the launcher's; ``visible`` are the devices that it may use.
    """

    rank: int
    size: int
    host: str
    process: int
    asked: str | None
    index: int | None
    device: str | None
    why: str
    loopback: str = ""
    network: str = ""
    local_rank: int | None = None
    local_size: int | None = None
    visible: str = ""


@dataclass(frozen=True)
class BackendDecision:
    """Decision of all ranks: the backend and the reason; without a backend, why they cannot go on.

    ``note``: what is wrong with the local ranks, and does not stop them.
    """

    backend: str | None
    why: str
    ranks: tuple[int, ...] = ()
    note: str = ""


def capabilities(launch: Launch, asked: str | None) -> Capabilities:
    """Return the capabilities of this process; ``asked`` is the backend that it requests."""
    rank, shared = launch.rank, ranks_share()
    index, why = _device_index(launch.local_rank, shared)
    device = None if index is None else str(getattr(torch.cuda.get_device_properties(index), "uuid", index))
    # A share of a device is a device of its own.
    identity = f"{device}/{rank}" if device and shared else device
    here = launch.host, os.getpid(), asked, index, identity, why, loopback_address(), _network()
    visible = identity or os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return Capabilities(rank, launch.world_size, *here, launch.local_rank, launch.local_world_size, visible)


def loopback_address() -> str:
    """Return the loopback address to which this host's name resolves, where gloo would listen; "" for any other.

    Debian writes a host's own name as 127.0.1.1 into its hosts file. Where ``GLOO_SOCKET_IFNAME`` names an interface,
    gloo listens there.
    """
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return ""
    try:
        found = addresses_of(socket.gethostname())
    except OSError:
        found = []
    # What gloo does: the first address of this host, and the loopback address where there is none.
    address = next((str(place[0]) for family, place in found if is_local(family, place)), "127.0.0.1")
    return address if ip_address(address.partition("%")[0]).is_loopback else ""


def _network() -> str:
    """Return the loopback interface of this process, by its machine and its network namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{Path('/proc/self/ns/net').readlink()}"
    except OSError:
        return socket.gethostname()


def ranks_share() -> bool:
    """Return whether several ranks may use one GPU: NCCL is configured so, and supports it."""
    shared = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    return shared and dist.is_available() and dist.is_nccl_available() and torch.cuda.nccl.version() >= (2, 30)


def _device_index(local_rank: int | None, shared: bool) -> tuple[int | None, str]:
    if not (dist.is_available() and dist.is_nccl_available()):
        return None, "its torch has no NCCL"
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return pick(seen, local_rank, shared=shared)


def pick(seen: int, local_rank: int | None, *, shared: bool = False) -> tuple[int | None, str]:
    """Return the index of a rank's device of those ``seen``, or None and why; ``shared``: ranks take turns on them.

    >>> pick(8, 3), pick(1, 3), pick(2, 3)
    ((3, ''), (0, ''), (None, 'it sees 2 GPUs, and is the one with local rank 3'))
    >>> pick(2, 3, shared=True)
    (1, '')
    """
    if seen == 0:
        return None, "it sees no GPU"
    if seen == 1:
        return 0, ""
    if local_rank is None:
        return None, f"it sees {seen} GPUs, and its launcher does not tell its local rank"
    if shared:
        return local_rank % seen, ""
    if local_rank >= seen:
        return None, f"it sees {seen} GPUs, and is the one with local rank {local_rank}"
    return local_rank, ""


def choose(gathered: Sequence[Capabilities]) -> BackendDecision:
    """Choose the backend of ranks with these capabilities.

    >>> one = Capabilities(0, 2, "h", 1, None, 0, "x", "")
    >>> choose([one, Capabilities(1, 2, "h", 2, None, None, None, "it sees no GPU")])
    BackendDecision(backend='gloo', why='rank 1 on h has no GPU of its own: it sees no GPU', ranks=(1,), note='')
    """
    for name in ("size", "asked"):
        odd = _differing(gathered, name)
        if odd is not None:
            return odd
    asked = gathered[0].asked
    ranks, why = _without(gathered)
    if asked is not None and "nccl" in asked and ranks:
        return BackendDecision(
            None, f"backend {asked!r} needs a GPU for each rank; {why}; ask for gloo, or for no backend", ranks
        )
    if asked is not None:
        chosen = BackendDecision(asked, "asked for")
    else:
        chosen = (
            BackendDecision("gloo", why, ranks) if ranks else BackendDecision("nccl", "every rank has a GPU of its own")
        )
    return (_unreachable(gathered) if "gloo" in str(chosen.backend) else None) or chosen


def _unreachable(gathered: Sequence[Capabilities]) -> BackendDecision | None:
    """Ranks on several hosts, one of which gloo would make listen where no other host can reach it."""
    found = [one for one in gathered if one.loopback]
    if not found or len({one.network for one in gathered}) < 2:
        return None
    hosts = list(dict.fromkeys(f"{one.host} listens at {one.loopback}" for one in found))
    return BackendDecision(
        None,
        f"{first_of(hosts)}, where no other host can reach gloo; set GLOO_SOCKET_IFNAME to the network interface "
        "between the hosts, on every rank",
        tuple(one.rank for one in found),
    )


def _differing(gathered: Sequence[Capabilities], name: str) -> BackendDecision | None:
    first = gathered[0]
    odd = [other for other in gathered if getattr(other, name) != getattr(first, name)]
    if not odd:
        return None
    what = {"size": "a world of {} ranks", "asked": "backend {}"}[name]
    ours, theirs = (what.format(getattr(one, name)) for one in (first, odd[0]))
    return BackendDecision(
        None,
        f"rank {first.rank} on {first.host} says {ours}, {in_words([one.rank for one in odd])} on {odd[0].host} "
        f"{theirs}; they must say the same; start all ranks with one launcher and the same arguments",
        tuple(one.rank for one in odd),
    )


def _without(gathered: Sequence[Capabilities]) -> tuple[tuple[int, ...], str]:
    """Return the ranks that have no device of their own, and why the first of them has none."""
    taken: dict[tuple[str, str], int] = {}
    found: Mapping[int, str] = {}
    for one in gathered:
        if one.device is None:
            found = {**found, one.rank: one.why}
        elif taken.setdefault((one.host, one.device), one.rank) != one.rank:
            found = {**found, one.rank: f"it shares one with rank {taken[one.host, one.device]}"}
    if not found:
        return (), ""
    first = next(one for one in gathered if one.rank in found)
    others = f", nor have {len(found) - 1} more" if len(found) > 1 else ""
    return tuple(found), f"rank {first.rank} on {first.host} has no GPU of its own: {found[first.rank]}{others}"


def decide(
    store: Store, prefix: str, local: Capabilities, seconds: float, *, serves: bool
) -> tuple[BackendDecision, Round]:
    """Agree on the backend once all ranks have arrived; also return the round, whose next step is the caller's.

    Raises ``ConnectError`` on every rank where what they have does not go together, ``AgreementError`` naming the
    ranks that do not arrive in time, ``StoreLost`` when the store is gone; its ``met`` says whether rank 0 was seen in
    this round: otherwise it may be the store of an earlier world, which rank 0 was about to close.
    """
    met = False
    try:
        identity = f"process {local.process} on {local.host}"
        found = Round(StoreChannel(store, prefix), "init", range(local.size), local.rank, serves, identity)

        def look() -> None:
            nonlocal met
            met = met or found.seen(0)

        look()
        return _decided(found, local, _ForWorld(seconds, look, if_odd=_ODD)), found
    except StoreLost as error:
        raise StoreLost(error.message, rank=local.rank, missing=(0,), met=met) from error


@dataclass(frozen=True)
class _ForWorld(WaitPolicy):
    """Wait for the decision, and ``look`` after a moment without one."""

    look: Callable[[], None]

    def wait(self, among: Round, step: Step) -> Outcome[BackendDecision] | None:
        if (received := among.receive(step, min(_LOOK, self.seconds))) is not None:
            return received
        self.look()
        return super().wait(among, step)


_DECISION = Codec(asdict, lambda data: BackendDecision(**{**data, "ranks": tuple(data["ranks"])}))


def _decided(found: Round, local: Capabilities, policy: _ForWorld) -> BackendDecision:
    def conclude(arrivals: Arrivals) -> Outcome[BackendDecision]:
        gathered = [Capabilities(**json.loads(texts[-1])) for _, texts in sorted(arrivals.texts.items())]
        if len({each.size for each in gathered}) == 1 and not arrivals.complete:
            return or_missing(lambda _: _decision(gathered), policy.seconds, "init()")(arrivals)
        return _decision(gathered)

    proposal = Proposal(f"{local.size} {local.asked}", text=json.dumps(asdict(local)))
    outcome = found.step("capabilities", proposal, conclude, policy, _DECISION)
    if not outcome.agreed:
        found.leave(outcome)
        kind = AgreementError if outcome.missing else ConnectError
        values = {"missing": outcome.missing} if outcome.missing else {}
        raise kind(
            f"rank {local.rank} of {local.size}: {outcome.message}", rank=local.rank, ranks=outcome.ranks, **values
        )
    return outcome.value


def _decision(gathered: list[Capabilities]) -> Outcome[BackendDecision]:
    decision = choose(gathered)
    if decision.backend is None:
        return Outcome("failed", decision.ranks, message=decision.why)
    facts = [
        LocalRank(one.host, one.rank, one.local_rank, one.local_size, one.visible, one.network) for one in gathered
    ]
    return Outcome(value=replace(decision, note="; ".join(contradictions(facts))))
