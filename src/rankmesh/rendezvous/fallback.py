"""Several channels as one: what is written goes to all of them, and the first that answers counts.

```
store      all ranks have it, until the process that serves it is gone, or the network
folder     the ranks of a host share it, if not all of them do
```

For ranks that must reach each other when everything else fails. One that has lost the store still finds the others,
because they write to the folder too, and look there from time to time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from rankmesh.rendezvous.channel import Channel, ChannelLost
from rankmesh.rendezvous.waiting import answered_within, submit

__all__ = ["BoundedChannel", "FallbackChannel"]

_Result = TypeVar("_Result")

# Seconds between two looks for a key, and that a store may take to answer.
_PACE, _PATIENCE = 0.05, 5.0
# One of so many looks is at all channels, as long as the first of them answers.
_ALL = 3
# So many participants may each list a folder with a file of each.
_FEW = 128


class BoundedChannel:
    """A channel whose calls end in time; while it owes an answer, it is not asked again.

    Where a network is cut, torch's client does not come back at its timeout. A store that only stood still, as for a
    name server that does not answer, is there again after that.
    """

    def __init__(self, channel: Channel, patience: float = _PATIENCE) -> None:
        self.channel, self._patience = channel, patience
        self._pending: Future[Any] | None = None

    def ask(self, call: Callable[[Channel], _Result]) -> _Result:
        """Return what a call of the channel gives; ``ChannelLost`` where it fails, or is not back in time."""
        if not self.channel.remote:
            return call(self.channel)
        if self._pending is not None and not self._pending.done():
            raise ChannelLost("an earlier call is still under way")
        self._pending = made = submit(lambda: call(self.channel), "rankmesh-store")
        return answered_within(made, self._patience)


class FallbackChannel:
    """Channels, the one that counts most first; ``pace`` is how many seconds lie between two looks for a key."""

    remote = False

    def __init__(self, channels: Sequence[BoundedChannel], pace: float = _PACE) -> None:
        self._channels, self._pace, self._looks = tuple(channels), pace, 0

    def again(self) -> FallbackChannel:
        """Return a channel of these keys over other connections."""
        again = [BoundedChannel(bounded.ask(lambda channel: channel.again())) for bounded in self._channels]
        return FallbackChannel(again, self._pace)

    def _asked(self, call: Callable[[Channel], _Result]) -> Iterator[_Result]:
        """Return what each channel gives that answers, one after the other; ``ChannelLost`` where none does."""
        lost, answered = ChannelLost("there is neither a store nor a folder"), False
        for number, bounded in enumerate(self._channels):
            try:
                answer = bounded.ask(call)
            except ChannelLost as error:  # noqa: PERF203  - the others may answer
                lost = lost if number else error
            else:
                answered = True
                yield answer
        if not answered:
            raise lost

    def _answers(self, call: Callable[[Channel], _Result]) -> list[_Result]:
        return list(self._asked(call))

    # -- sets ---------------------------------------------------------------------------------------------------

    def arrive(self, key: str, participants: Sequence[int], rank: int, *, asks: bool = True) -> bool:
        """Add a participant to a set; whether the set is complete by that, on the first channel or, of few, on any."""
        few, complete = len(participants) <= _FEW, list[bool]()

        def arrive(channel: Channel) -> None:
            complete.append(channel.arrive(key, participants, rank, asks=asks and (few or not complete)))

        self._answers(arrive)
        return any(complete)

    def absent(self, key: str, participants: Sequence[int]) -> list[int]:
        """Return the participants that are in a set on no channel."""
        absent = set.intersection(*self._answers(lambda channel: set(channel.absent(key, participants))))
        return [rank for rank in participants if rank in absent]

    # -- texts --------------------------------------------------------------------------------------------------

    def post(self, key: str, rank: int, text: str) -> None:
        self._answers(lambda channel: channel.post(key, rank, text))

    def posted(self, key: str, writers: int = 1) -> dict[int, list[str]]:
        """Return the texts of each rank, in its order, as the channel has them that has most of them."""
        found: dict[int, list[str]] = {}
        for answer in self._answers(lambda channel: channel.posted(key, writers)):
            for rank, texts in answer.items():
                found[rank] = max(found.get(rank, []), texts, key=len)
        return found

    def first(self, key: str, text: str) -> str:
        """Write a text if none is there; the text that is there then, on the first channel that answers."""
        answers = self._asked(lambda channel: channel.first(key, text))
        text = next(answers)  # what the other channels are to have, too
        list(answers)
        return text

    announce = first  # who waits looks from time to time

    def write(self, key: str, text: str) -> None:
        """Write a text."""
        self._answers(lambda channel: channel.write(key, text))

    def read(self, key: str) -> str | None:
        """Return the text under a key, as the first channel has it that has one; None where there is none."""
        return next((text for text in self._asked(lambda channel: channel.read(key)) if text is not None), None)

    def wait(self, key: str, seconds: float) -> bool:
        """Look for a text under a key for at most ``seconds``; return whether there is one."""
        end = time.monotonic() + seconds
        while not (there := self._look(key)) and (left := end - time.monotonic()) > 0:
            time.sleep(min(self._pace, left))
        return there

    def _look(self, key: str) -> bool:
        self._looks += 1
        answers = self._asked(lambda channel: channel.wait(key, 0))
        return next(answers) or (self._looks % _ALL == 0 and any(answers))

    # -- numbers ------------------------------------------------------------------------------------------------

    def advance(self, key: str, number: int) -> None:
        self._answers(lambda channel: channel.advance(key, number))

    def tick(self, key: str, amount: int) -> int:
        """Add to a number that starts at 0; its new value, the highest of all channels."""
        return max(self._answers(lambda channel: channel.tick(key, amount)))

    # -- the rest -----------------------------------------------------------------------------------------------

    def delete(self, keys: Iterable[str], *, sets: Iterable[str] = (), participants: Sequence[int] = ()) -> None:
        keys, sets = list(keys), list(sets)
        self._answers(lambda channel: channel.delete(keys, sets=sets, participants=participants))
