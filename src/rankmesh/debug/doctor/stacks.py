"""Stacks of processes as text: the collective that each rank is in, or its line of the program where it is in none.

```
py-spy dump               Thread 71 (idle): "MainThread"                            call first, native frames between
py-spy dump -j            [{"thread_name": "MainThread", "frames": [...]}]
pystack remote            Traceback for thread 71 (python) [] (most recent call last):          call last
faulthandler              Current thread 0x00007f61 (most recent call first):
```

A call is *firm* where a frame of ``torch.distributed`` shows it. A backward pass and a wait for the device may wait for
another rank or not. A rank is named only if it is in neither, and all other ranks are in a call.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rankmesh.core.grouped import grouped
from rankmesh.debug.doctor.lines import Line
from rankmesh.debug.doctor.sites import site_of
from rankmesh.debug.doctor.texts import Origin, Text, origin_of, ranked

__all__ = ["Place", "Thread", "lines_of_stacks", "stacks_of", "threads_of"]

_THREADS, _FRAMES, _SHOWN = 1 << 14, 512, 4
_IS_STACK = re.compile(r"most recent call (?:first|last)\)|\((?:idle|active)[^)\n]{0,20}\)|\"thread_name\"")
_IS_JSON = re.compile(r"\s*\[\s*\{")
_PROCESS = re.compile(r"Process (?P<pid>\d{1,9}): (?P<command>.{0,4000})")
_OF_COMMAND = re.compile(r"--(?:local[-_])?rank[= ](\d{1,7})\b")
# The header of a thread: its number, its name where it has one, and whether its calls follow first or last.
_HEADERS = tuple(
    re.compile(header)
    for header in (
        r"Thread (?P<id>(?:0x)?[0-9A-Fa-f]{1,16}) \((?:idle|active)[^)]{0,20}\)(?:: \"(?P<name>[^\"]{0,200})\")?",
        (
            r"(?:(?:Current t|T)hread (?P<id>0x[0-9A-Fa-f]{1,16})(?: \[(?P<name>.{0,200})\])?|Stack)"
            r" \(most recent call first\):"
        ),
        r"Traceback for thread (?P<id>\d{1,9})\b(?P<name>).{0,200}\(most recent call (?P<last>last)\):?",
    )
)
_FRAME = re.compile(
    r"\s+(?:(?P<name>[^\s(].{0,200}?) \((?P<file>[^()]{1,400}):(?P<line>\d{1,7})\)"
    r"|(?:\((?P<kind>\w{1,10})\) )?File \"(?P<at>[^\"]{1,400})\", line (?P<number>\d{1,7}),? in "
    r"(?P<function>.{1,300}?)(?: \([^()]{0,400}\))?)\s*"
)
_NATIVE = re.compile(r"\s+\S.{0,4000}? \([^()]{0,400}\)\s*")
# Processes of a job that are not ranks: loaders of data, launchers, compilers.
_HELPER = re.compile(
    r"torch/utils/data/_utils/worker\.py|torch/distributed/(?:run|launcher/\w+|elastic/agent/.+)\.py"
    r"|torch/_inductor/compile_worker/__main__\.py|multiprocessing/(?:resource_tracker|forkserver)\.py"
)
_COLLECTIVE = (
    r"(?:_?all_reduce\w*|broadcast|reduce|_?all_gather\w*|gather|scatter|_?reduce_scatter\w*|all_to_all\w*"
    r"|(?:monitored_)?barrier|i?send|i?recv|batch_isend_irecv|\w+_object(?:_list)?|new_group|split_group"
    r"|new_subgroups\w*|init_process_group|destroy_process_group|_new_process_group_helper|_store_based_barrier)"
)
# Where a rank may wait, by file and function: the operation (its own name if it has none), and whether that is firm.
_CALLS = tuple(
    (re.compile(pattern), operation, firm)
    for pattern, operation, firm in (
        (rf"torch/distributed/distributed_c10d\.py {_COLLECTIVE}$", "", True),
        (r"torch/distributed/_functional_collectives\.py (?![_<])", "", True),
        (r"torch/distributed/utils\.py _(?:verify_param|sync)\w+$", "", True),
        (r"rankmesh/runtime/(?:connect|warm)\.py (?:connect|warm_up)$", "", True),
        (r"torch/autograd/(?:graph\.py _engine_run_backward|__init__\.py (?:backward|grad))$", "backward", False),
        (r"torch/(?:cuda|npu|xpu)/(?:__init__|streams)\.py (?:synchronize|wait\w*)$", "synchronize", False),
        (r"torch/distributed/(?:_composable/|_?fsdp/|tensor/|pipelining/)", "", False),
        (r"torch/nn/parallel/distributed\.py", "", False),
    )
)
# Native functions, and words of a source line, in which a rank waits.
_WAITS = (
    (re.compile(r"c10d::\w*Work\w*::(?:wait|synchronize)|c10d::Work|\b_?\w*\.wait\("), "wait", True),
    (re.compile(r"\bc10d::|\bgloo::|\bp?nccl[A-Z]"), "a collective", True),
    (re.compile(r"cu(?:da)?(?:Stream|Event|Device|Ctx)Synchronize"), "synchronize", False),
    (re.compile(r"\.(?:item|tolist|cpu|synchronize)\("), "synchronize", False),
)


@dataclass
class Thread:
    """One thread: its Python frames as (file, line, function); the native frames and source lines below them."""

    name: str
    is_reversed: bool
    frames: list[tuple[str, int, str]] = field(default_factory=list)
    native: list[str] = field(default_factory=list)
    source: list[str] = field(default_factory=list)

    @property
    def innermost(self) -> list[tuple[str, int, str]]:
        """The frames, innermost first."""
        return self.frames[::-1] if self.is_reversed else self.frames

    @property
    def site(self) -> str:
        """The innermost line of the program; py-spy prints paths without the folder of the library."""
        return site_of(
            frame
            for frame in self.innermost
            if not frame[0].startswith(("<", "torch/", "rankmesh/"))
            and frame[0].partition("/")[0].removesuffix(".py") not in sys.stdlib_module_names
        )

    @property
    def native_frame(self) -> str:
        """The innermost frame where that is native: ``spin (gil.c:3)``."""
        return self.native[-self.is_reversed] if self.native else ""


@dataclass(frozen=True)
class Place:
    """The place of a process: the call that it waits in, "" for none, and its line of the program."""

    origin: Origin
    call: str
    site: str
    is_firm: bool = True


def stacks_of(text: Text) -> tuple[Place, ...]:
    """Return the place of each process of a text, by its last dump; nothing if the text has no stacks."""
    if not _IS_STACK.search(text.content):
        return ()
    found: dict[tuple[Origin, str], Collection[Thread]] = {}
    for origin, pid, threads in (_of_json if _IS_JSON.match(text.content) else _of_text)(text):
        found[origin, pid] = threads
    places = (_place(origin, [*threads]) for (origin, _), threads in found.items())
    return tuple(place for place in places if place is not None)


def threads_of(text: str) -> list[Thread]:
    """Return the threads of one process, by its last dump in a text."""
    return next(([*threads] for _, _, threads in _of_text(Text(Path(), text))), [])


def _of_json(text: Text) -> Iterator[tuple[Origin, str, Collection[Thread]]]:
    """Yield the processes in the output of ``py-spy dump -j``."""
    by_process: dict[str, list[Thread]] = {}
    try:
        for about in json.loads(text.content)[:_THREADS]:
            frames = [(str(f["filename"]), int(f["line"]), str(f["name"])) for f in about["frames"][:_FRAMES]]
            thread = Thread(str(about.get("thread_name") or ""), is_reversed=False)
            for file, line, name in frames:
                if _is_python(file):
                    thread.frames.append((file, line, name))
                elif not thread.frames:
                    thread.native.append(name)
            by_process.setdefault(str(about.get("pid", "")), []).append(thread)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return
    yield from ((origin_of(text.path), pid, threads) for pid, threads in by_process.items())


def _of_text(text: Text) -> list[tuple[Origin, str, Collection[Thread]]]:
    """Return the processes of a text, the later dump of one process after the earlier one."""
    found: list[tuple[Origin, str, dict[str, Thread]]] = []
    current: dict[Origin, Thread | None] = {}
    process: dict[Origin, dict[str, Thread]] = {}
    count = 0
    for origin, line in text.lines():
        if match := _PROCESS.match(line):
            rank, whose = _OF_COMMAND.search(match["command"]), origin
            if rank and origin.rank is None:
                whose = Origin(origin.path, origin.prefix, None, int(rank[1]))
            process[origin], current[origin] = {}, None
            found.append((whose, match["pid"], process[origin]))
        elif match := next((head for header in _HEADERS if (head := header.match(line))), None):
            count += 1
            if count > _THREADS:
                break
            about = match.groupdict()
            current[origin] = thread = Thread(about.get("name") or "", bool(about.get("last")))
            if origin not in process:
                process[origin] = {}
                found.append((origin, "", process[origin]))
            # faulthandler may have written another dump; the main thread is the last one of each.
            process[origin].pop(number := about["id"] or "", None)
            process[origin][number] = thread
        elif line.startswith("Timeout (") and origin in process:
            process[origin].clear()
        elif (inside := current.get(origin)) is not None and not _add(inside, line):
            current[origin] = None
    return [(whose, pid, threads.values()) for whose, pid, threads in found]


def _add(thread: Thread, line: str) -> bool:
    """Add a line to a thread; return whether the thread may go on behind it."""
    if match := _FRAME.fullmatch(line):
        file, number = match["file"] or match["at"], match["line"] or match["number"]
        name = (match["name"] or match["function"]).strip()
        if match["kind"] in (None, "Python") and _is_python(file):
            if len(thread.frames) < _FRAMES:
                thread.frames.append((file, int(number), name))
            if thread.is_reversed:
                thread.native, thread.source = [], []
        elif thread.is_reversed or not thread.frames:
            thread.native.append(f"{name} ({file}:{number})")
        return True
    if thread.is_reversed and line[:1].isspace() and thread.frames:
        thread.source.append(line.strip()[:400])
    elif not thread.frames and _NATIVE.fullmatch(line):
        thread.native.append(line.strip())
    return line[:1].isspace() or not line


def _is_python(file: str) -> bool:
    return file.endswith(".py") or file.startswith("<")


def _place(origin: Origin, threads: Sequence[Thread]) -> Place | None:
    """Return the place of a process, by its main thread or by another one in a call; None for a helper of the job."""
    frames = [frame for thread in threads for frame in thread.frames]
    if not frames or any(_HELPER.search(file) for file, _, _ in frames):
        return None
    main = next((one for one in threads if one.name == "MainThread"), None)
    main = main or next((one for one in threads if one.frames and one.innermost[-1][2] == "<module>"), threads[-1])
    calls = [call for one in (main, *threads) if (call := _call(one)) is not None]
    operation, firm = next((call for call in calls if call[1]), calls[0] if calls else ("", True))
    return Place(origin, operation, main.site, firm)


def _call(thread: Thread) -> tuple[str, bool] | None:
    """Return the call of a thread and whether it is firm: the outermost firm one, else by its innermost frame."""
    at, loose = [f"{file} {name.rpartition('.')[2]}" for file, _, name in thread.innermost], None
    for frame in at[::-1]:
        found = next((call for call in _CALLS if call[0].search(frame)), None)
        if found is not None and (found[2] or frame is at[0]):
            loose = found[1] or frame.rpartition(" ")[2], found[2]
            if found[2]:
                return loose
    text = "\n".join([*thread.native, *thread.source][-64:])
    waits = next(((operation, firm) for pattern, operation, firm in _WAITS if pattern.search(text)), None)
    return waits if waits is not None and (waits[1] or loose is None) else loose


# -- lines of ranks ----------------------------------------------------------------------------------------------------


def lines_of_stacks(places: Sequence[Place], world_size: int = 0) -> Iterator[Line | str]:
    """Yield a line for each rank, in a call or in none; words for processes of unknown rank."""
    rank_of = ranked((place.origin for place in places), world_size)
    by_rank = grouped((rank_of[place.origin], place) for place in places)
    others = by_rank.get(None, [])
    for rank, dumps in by_rank.items():
        if rank is not None:
            place = next((one for one in dumps if one.call), dumps[0])
            trust = "" if others else "likely" if place.is_firm else "possible"
            one = Line(source=place.origin.path, rank=rank, site=place.site, trust=trust, is_running=not place.call)
            yield replace(one, number=0, operation=place.call) if place.call else one
    if others:
        in_call = sum(bool(place.call) for place in others)
        yield f"{in_call} of {len(others)} processes whose ranks are not known are in a collective"
