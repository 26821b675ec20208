r"""Commands of containers: of Dockerfiles, Docker Compose files and Kubernetes manifests, each as a script.

```
Dockerfile     ENTRYPOINT with CMD, RUN; ENV and ARG are variables; a stage has what the stage before it has
Compose        entrypoint with command, a list or a text; environment, a list or a mapping
Kubernetes     command with args in any container of any kind; env; $(NAME) is replaced as Kubernetes does
```

A text that a shell runs (``sh -c``) is read as a script. Words have the lines of the file on which they are written.

>>> *_, found = read_containers('FROM a\nCMD ["vllm", "serve", "m", \\\n  "--tp", "4"]\n', "Dockerfile")
>>> [(shown(word), word[0].lines) for word in found.script.commands[0].words[-2:]]
[('--tp', (3,)), ('4', (3,))]
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from rankmesh.core.documents import Budget, Invalid, Unreadable, compose_documents
from rankmesh.readers.documents import yaml_pairs
from rankmesh.readers.options import Option
from rankmesh.readers.script import TAKEN, Command, Script, Variable, read_script
from rankmesh.readers.tokens import Part, Word, gap_of, shown

__all__ = ["Container", "has_containers", "is_dockerfile", "read_containers"]

_DOCKERFILE = re.compile(r"(.*[/.])?(Dockerfile|Containerfile)([.-][^/]*)?", re.IGNORECASE)
_KEY = re.compile(r"(^|[\s{,-])[\"']?(command|args|entrypoint)[\"']?[ \t]*:")
_SHELL = re.compile(r"(.*/)?(ba|da|z)?sh")
_SHELL_TEXT = re.compile(r"-[a-z]*c[a-z]*")
# Images whose entrypoint is `vllm serve`.
_SERVES = re.compile(r"(.*/)?vllm-openai([-:@].*)?")
# Texts in quotes, which keep their line ends, and other line ends.
_QUOTED = re.compile(r"(\"(?:\\.|[^\"\\])*\"|'[^']*')|\n", re.DOTALL)

# Containers and instructions of one file.
_MOST = 2_000
# Variables in a word: of Kubernetes, and of Compose.
_KUBERNETES = re.compile(r"\$\((?P<name>[A-Za-z_][\w.-]*)\)")
_COMPOSE = re.compile(r"\$(?:\{(?P<name>\w+)(?::?-(?P<default>[^{}]*))?\}|(?P<bare>[A-Za-z_]\w*))")
# Kinds whose pods have only the variables of the manifest.
_PLAIN_KINDS = {"Deployment", "StatefulSet", "DaemonSet", "ReplicaSet", "Pod"}
# For each kind the keys that count pods, and the variables that give their number to a pod.
_COUNTS: Mapping[str, tuple[str, ...]] = {
    "PyTorchJob": ("replicas",),
    "JobSet": ("parallelism", "replicas", "completions"),
    "TrainJob": ("numNodes",),
    "LeaderWorkerSet": ("size",),
    "Job": ("parallelism", "completions"),
    "StatefulSet": ("replicas",),
}
_GROUP = {"LeaderWorkerSet": ("LWS_GROUP_SIZE",), "PyTorchJob": ("PET_NNODES",), "TrainJob": ("PET_NNODES",)}
_EACH = ("nprocPerNode", "numProcPerNode")
_GPU = re.compile(r".*\.com/gpu|count")
_DYNAMO = "Dynamo"  # kinds of NVIDIA Dynamo, whose services have the GPUs and the nodes of their containers


@dataclass(frozen=True)
class Container:
    """The commands of one container, and what its manifest states of its pods.

    ``pods``: each number of pods that may be the nodes of a run, none where the manifest does not decide it;
    ``gpus``: the GPUs of one pod; ``group``: how many pods serve one model together.
    """

    script: Script
    pods: tuple[Option, ...] = ()
    gpus: Option | None = None
    group: int = 1


def is_dockerfile(path: str) -> bool:
    """Return whether a file has the name of a Dockerfile.

    >>> [is_dockerfile(name) for name in ("docker/Dockerfile.gpu", "train.dockerfile", "Containerfile", "docker.md")]
    [True, True, True, False]
    """
    return _DOCKERFILE.fullmatch(path) is not None


def has_containers(text: str, path: str) -> bool:
    """Return whether a file may have commands of containers."""
    return is_dockerfile(path) or (path.endswith((".yaml", ".yml")) and _KEY.search(text) is not None)


def read_containers(text: str, path: str) -> list[Container]:
    """Return the containers of a file in the order of its lines; empty for a file of another kind.

    Raises ``Unreadable`` for a text that is not read.
    """
    budget = Budget(_MOST)
    if is_dockerfile(path):
        return [Container(script) for script in _dockerfile(text, budget)]
    try:
        documents = compose_documents(text)
    except Invalid:
        return []  # a template
    lines = text.split("\n")
    return [found for tree in documents if tree.node is not None for found in _walked(tree.node, (), lines, budget)]


# -- commands ---------------------------------------------------------------------------------------------------------


def _script(
    words: Sequence[Word],
    variables: dict[str, Variable],
    *unknown: tuple[re.Pattern[str], Part],
    starts: Sequence[int] = (),
) -> Script:
    """Return the commands that some words start: the words themselves, or the text that they give to a shell.

    ``unknown``: the variables that may be left in words, and what they are read as; ``starts`` of a text that has them.
    """
    texts = [shown(word) for word in words]
    shell = next((at for at, text in enumerate(texts) if _SHELL.fullmatch(text)), len(texts))
    option = next((at for at in range(shell + 1, len(texts)) if _SHELL_TEXT.fullmatch(texts[at])), len(texts))
    given = words[option + 1 :][texts[option + 1 : option + 2] == ["--"] :]
    if given:
        return _of_text(given[0], variables, starts)
    for pattern, gap in unknown:
        words = [_replaced(word, pattern, variables, gap) for word in words]
    taken = {name: variables[name] for name in TAKEN if name in variables}
    return Script({}, variables, [Command(tuple(words), words[0][0].lines[0], taken)] if words else [])


def _of_text(text: Word, variables: dict[str, Variable], within: Sequence[int] = ()) -> Script:
    """Read a text as a script, and the texts that it gives to shells; ``within``: the starts of a text that has it."""
    content, starts = _placed(text, within)
    script = read_script(content, variables, starts=starts)
    commands = []
    for command in script.commands:
        known = command.within.endswith("-c") and not any(map(gap_of, command.words))
        commands += _script(command.words, script.variables, starts=starts).commands if known else [command]
    script.commands = commands
    return script


def _placed(word: Word, within: Sequence[int] = ()) -> tuple[str, list[int]]:
    """Return the text of a word, and the places in it at which the lines of the file begin."""
    content, starts = "", list[int]()
    for part in word:
        starts += [len(content)] * (part.lines[0] - len(starts))
        text = part.text or part.shown
        inside = (
            within[bisect_right(within, part.at) : bisect_right(within, part.at + len(text))] if part.at >= 0 else ()
        )
        starts += [len(content) + place - part.at for place in inside]
        content += text
    return content, starts


def _replaced(
    word: Word, pattern: re.Pattern[str], variables: Mapping[str, Variable], unknown: Part | None = None
) -> Word:
    """Replace variables in a word by their values or defaults; others are ``unknown``, or stay as they are written."""
    parts: list[Part] = []
    for part in word:
        at, text = 0, part.text or ""
        for found in pattern.finditer(text):
            names = found.groupdict()
            name, default = names["name"] or names.get("bare") or "", names.get("default")
            value = variables[name].words[0] if name in variables else ()
            if value and (unknown is not None or gap_of(value) is None):
                made = [one._replace(lines=(*part.lines, *one.lines)) for one in value]
            elif default is not None:
                made = [part._replace(text=default, default=True)]
            elif unknown is not None:
                why = unknown.why or f"the container has no variable {name}"
                made = [unknown._replace(lines=part.lines, shown=found[0], why=why)]
            else:
                continue
            parts += [part._replace(text=text[at : found.start()]), *made]
            at = found.end()
        parts.append(part._replace(text=text[at:]) if part.text is not None else part)
    return tuple(part for part in parts if part.text != "") or word[:1]


# -- Dockerfiles ------------------------------------------------------------------------------------------------------

_INSTRUCTION = re.compile(r"^[ \t]*([A-Za-z]+)[ \t]+((?:.*\\[ \t]*\n(?:[ \t]*(?:#.*)?\n)*)*.*)$", re.MULTILINE)
# The end of a line that goes on, with comments after it; options of an instruction.
_CONTINUED = re.compile(r"\\[ \t]*\n(?:[ \t]*(?:#.*)?\n)*")
_OPTIONS = re.compile(r"\A(?:--\S+[ \t]+|\\\n[ \t]*)+")
_FROM = re.compile(r"(\S*)(?:\s+as\s+(\S+))?", re.IGNORECASE)
_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"')


@dataclass(frozen=True)
class _Stage:
    """A stage of a build: its variables, and the words that a container of it starts; ``base``: the command before."""

    variables: dict[str, Variable]
    entrypoint: tuple[Word, ...] = ()
    command: tuple[Word, ...] = ()
    base: tuple[Word, ...] = ()


def _dockerfile(text: str, budget: Budget) -> Iterator[Script]:
    stage, alias, stages = _Stage({}), "", dict[str, _Stage]()
    for name, word in _instructions(text):
        budget.spend()
        with suppress(Unreadable):  # a text of another shell
            if name == "FROM":
                yield _script((*stage.entrypoint, *stage.command), stage.variables)
                stages[alias] = stage
                image, alias = _FROM.findall(shown(_replaced(word, _COMPOSE, stages[""].variables)))[0]
                serves = _SERVES.fullmatch(image) is not None
                stage = stages.get(image) or _Stage({}, _serve(word[0].lines[0]) if serves else ())
                stage, alias = replace(stage, base=stage.command), alias or str(len(stages))
            elif name in ("ENV", "ARG"):
                spaced = re.match(r"(\w+)[ \t]+(?=[^\s=])", word[0].text or "") if name == "ENV" else None
                if spaced:
                    word = (word[0]._replace(text=f"{spaced[1]}={(word[0].text or '')[spaced.end() :]}"), *word[1:])
                stage = replace(stage, variables=_of_text(word, stage.variables).variables)
            elif name == "RUN":
                yield _of_text(word, stage.variables)
            elif name == "CMD":
                stage = replace(stage, command=_started(word))
            elif name == "ENTRYPOINT":
                command = () if stage.command is stage.base else stage.command
                stage = replace(stage, entrypoint=_started(word), command=command)
    with suppress(Unreadable):
        yield _script((*stage.entrypoint, *stage.command), stage.variables)


def _instructions(text: str) -> Iterator[tuple[str, Word]]:
    """Yield each instruction with its arguments, a part for each line, without comments and options."""

    def ends(found: re.Match[str]) -> str:
        return "\\\n" * found[0].count("\n")

    for found in _INSTRUCTION.finditer(text):
        first = text.count("\n", 0, found.start(2)) + 1
        lines = _OPTIONS.sub(ends, _CONTINUED.sub(ends, found[2])).splitlines(keepends=True) or [""]
        yield found[1].upper(), tuple(Part(line, (number,)) for number, line in enumerate(lines, first))


def _started(word: Word) -> tuple[Word, ...]:
    """Return the words of a JSON list; another text is one that a shell runs."""
    content, starts = _placed(word)
    try:
        texts = json.loads(content.replace("\\\n", " \n"))
    except (ValueError, RecursionError):
        texts = None
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        return ((Part("sh", word[0].lines),), (Part("-c", word[0].lines),), word)
    lines = [bisect_right(starts, found.start()) for found in _TEXT.finditer(content)]
    return tuple((Part(text, (line,)),) for text, line in zip(texts, lines, strict=False))


# -- YAML -------------------------------------------------------------------------------------------------------------


def _values(node: Any) -> dict[str, Any]:
    """Return the nodes of a mapping by their keys, merged ones included; empty for another node."""
    return {key.value: value for key, value in yaml_pairs(node)} if node is not None and node.id == "mapping" else {}


def _items(node: Any) -> list[Any]:
    return node.value if node is not None and node.id == "sequence" else []


def _below(node: Any, *names: str) -> Any:
    """Return the node at a path of keys, None where there is none."""
    for name in names:
        node = _values(node).get(name)
    return node


def _text(node: Any) -> str:
    return node.value if node is not None and node.id == "scalar" else ""


def _walked(node: Any, above: tuple[Any, ...], lines: list[str], budget: Budget) -> Iterator[Container]:
    """Yield the containers below a node; ``above`` are the mappings that it is in, the outermost first."""
    values = _values(node)
    if not values.keys().isdisjoint(("command", "args", "entrypoint")):
        budget.spend()
        with suppress(Unreadable):  # a text that is not shell
            yield from _container(values, (*above, node), lines)
    for value in values.values():
        yield from _walked(value, (*above, node), lines, budget)
    for value in _items(node):
        yield from _walked(value, above, lines, budget)


def _container(values: dict[str, Any], above: tuple[Any, ...], lines: list[str]) -> Iterator[Container]:
    kind = _text(_below(above[0], "kind"))
    of_compose = not kind and _below(above[0], "services") is not None
    pattern, override = (_COMPOSE, "entrypoint") if of_compose else (_KUBERNETES, "command")
    pods = _pods(above, kind)
    variables = _environment(values.get("environment" if of_compose else "env"), lines, pattern)
    counts = [(name, pods[-1]) for name in _GROUP.get(kind, ()) if pods]
    counts += [("PET_NPROC_PER_NODE", count) for name in _EACH if (count := _count(above, name))]
    for name, count in counts:
        variables.setdefault(name, _variable((Part(str(count.value), (count.line,)),)))
    words, starts = list[Word](), list[int]()
    for node in (values[key] for key in ("entrypoint", "command", "args") if key in values):
        items = [_word(item, lines, of_compose) for item in _items(node) if item.id == "scalar"]
        words += [_replaced(item, pattern, variables) for item in items]
        if _text(node):
            split, starts = _split(_word(node, lines, of_compose), variables)
            words += split
    kserve = _text(_below(values.get("modelFormat"), "name")) == "huggingface"  # takes the options of vLLM
    if words and override not in values and (kserve or _SERVES.fullmatch(_text(values.get("image")))):
        words = [*_serve(words[0][0].lines[0]), *words]
    closed = kind in _PLAIN_KINDS and "envFrom" not in values
    gap = Part(None, (), runs=not closed, elsewhere=not closed)
    script = _script(words, variables, (pattern, gap), starts=starts)
    gpus = _gpus(values)
    if gpus is None and kind.startswith(_DYNAMO):
        services = (found for node in reversed(above) if (found := _below(node, "resources", "limits", "gpu")))
        gpus = next((replace(count, path=("gpu",)) for node in services if (count := _number(node))), None)
    together = pods and (kind == "LeaderWorkerSet" or kind.startswith(_DYNAMO))
    yield Container(script, pods, gpus, pods[-1].value if together else 1)


def _serve(line: int) -> tuple[Word, ...]:
    """Return the entrypoint of vLLM's images."""
    return ((Part("vllm", (line,)),), (Part("serve", (line,)),))


def _variable(word: Word) -> Variable:
    return Variable((word,), False, word[0].lines[:1])


def _environment(node: Any, lines: list[str], pattern: re.Pattern[str]) -> dict[str, Variable]:
    """Return variables of a list of names with values, of a list of ``NAME=value``, or of a mapping."""
    pairs = [(name, value, value) for name, value in _values(node).items()]
    pairs += [(_text(_below(item, "name")), _below(item, "value"), item) for item in _items(node)]
    found: dict[str, Variable] = {}
    for name, value, item in pairs:
        stated = _text(item).partition("=") if not name else ("", "", "")
        if value is not None and value.id == "scalar":
            word = _word(value, lines)
        elif stated[1]:
            name, word = stated[0], _word(item, lines)
            word = (word[0]._replace(text=(word[0].text or "").partition("=")[2]), *word[1:])
        else:
            gap = Part(None, (item.start_mark.line + 1,), shown=f"$({name})", runs=True)
            word = (gap._replace(why=f"{name} is set outside of the file"),)
        found[name] = _variable(_replaced(word, pattern, found))
    return found


def _word(node: Any, lines: list[str], unescaped: bool = False) -> Word:
    """Return a scalar as a word, a part for each line on which it is written; ``unescaped``: of Compose's ``$$``."""
    start, last = node.start_mark, node.end_mark.line
    value = node.value.replace("$$", "$") if unescaped else node.value
    parts, at, column = list[Part](), 0, start.column
    for number in range(start.line, min(last + 1, len(lines)) if start.line < last else start.line):
        begin, block = at, number == start.line and node.style in ("|", ">")
        for sign in "" if block else "".join(lines[number][column:].split()):
            place = at + len(value) - at - len(value[at:].lstrip())
            at = place + 1 if value[place : place + 1] == sign else at
        column = 0
        if at > begin:
            parts.append(Part(value[begin:at], (number + 1,)))
    line = parts[-1].lines[0] if parts else start.line + 1
    return (*parts, Part(value[at:], (line,))) if at < len(value) or not parts else tuple(parts)


def _split(word: Word, variables: dict[str, Variable]) -> tuple[list[Word], list[int]]:
    """Return the words of a text that no shell runs, as Compose splits it, and the starts of its lines."""
    content, starts = _placed(word)
    joined = _QUOTED.sub(lambda found: found[1] or " ", content)
    commands = read_script(joined, variables, starts=starts).commands
    return list(commands[0].words) if commands else [], starts


# -- counts of pods and GPUs ------------------------------------------------------------------------------------------


def _number(node: Any) -> Option | None:
    if re.fullmatch(r"[1-9]\d{0,4}", text := _text(node)) is None:
        return None
    return Option((), int(text), node.start_mark.line + 1)


def _count(above: Sequence[Any], *names: str) -> Option | None:
    """Return the innermost count at a path of keys in the mappings that something is in."""
    found = [number for node in above if (number := _number(_below(node, *names))) is not None]
    return replace(found[-1], path=names) if found else None


def _pods(above: Sequence[Any], kind: str) -> tuple[Option, ...]:
    """Return each number of pods that may be the nodes of one run; none where the kind or a policy leaves it open."""
    if kind.startswith(_DYNAMO):
        nodes = _count(above, "multinode", "nodeCount")
        return (nodes,) if nodes else ()
    counts = {name: count for name in _COUNTS.get(kind, ()) if (count := _count(above, name)) is not None}
    if not counts or _below(above[0], "spec", "elasticPolicy") is not None:
        return ()
    found = list(counts.values())
    total = replace(found[0], value=_total(above[0]))
    if kind == "PyTorchJob":
        return (total,)
    if kind == "JobSet":
        product = prod(count.value for name, count in counts.items() if name != "completions")
        return (*found, replace(found[0], value=product), total)
    # One of several such pods may be in another document.
    return tuple(found) if kind in _GROUP or max(count.value for count in found) > 1 else ()


def _total(node: Any) -> int:
    """Return the pods of all groups of a job, each a mapping with a template."""
    values = _values(node)
    if "template" in values:
        counts = [_number(values.get("replicas")), _number(_below(values["template"], "spec", "parallelism"))]
        return prod(count.value for count in counts if count is not None)
    return sum(map(_total, [*values.values(), *_items(node)]))


def _gpus(values: Mapping[str, Any]) -> Option | None:
    """Return the GPUs of a container: a limit of Kubernetes, or the devices of Compose."""
    resources = values.get("resources") or values.get("resourcesPerNode")
    devices = _items(_below(values.get("deploy"), "resources", "reservations", "devices"))
    limits = [*_values(_below(resources, "limits")).items(), *_values(_below(resources, "requests")).items()]
    limits += [("count", _below(device, "count")) for device in devices]
    found = [(name, count) for name, node in limits if _GPU.fullmatch(name) and (count := _number(node))]
    return replace(found[0][1], path=(found[0][0],)) if found else None
