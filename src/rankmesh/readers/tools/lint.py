r"""Findings of layouts that cannot run, in the scripts and configs of a folder; nothing is run.

A finding is an error of the readers that has a ``code``, a size that does not divide what is known of the model, or a
number of nodes or GPUs that Slurm, a manifest or an engine contradicts. A file that states no layout has no findings;
one that cannot be read has a note. Each run of a script, and of a container, is checked.

```
# rankmesh: ignore[heads,layers]        after a line: of this line; on a line of its own: of the whole file
# rankmesh: ignore                      every code
```

>>> linted = lint_text("dp: 2\ntensor_model_parallel_size: 3\nnum_attention_heads: 32\n", "run.yaml")
>>> print(linted.findings[0])  # doctest: +NORMALIZE_WHITESPACE
run.yaml:2: heads tensor_model_parallel_size = 3 does not divide num_attention_heads = 32 (line 3);
fix: tensor_model_parallel_size: 2
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rankmesh.core.documents import Invalid, Unreadable, read_text, refused_as
from rankmesh.errors import PlanError, RankmeshError, cut
from rankmesh.readers.config import is_script, laid_out, no_world, opened, problem_of
from rankmesh.readers.formats.megatron import FLAGS
from rankmesh.readers.formats.recognised import KNOWN
from rankmesh.readers.launches import launches_of, slurm_variables
from rankmesh.readers.options import NO_LAYOUT, Options, gathered, run_it
from rankmesh.readers.script import read_script
from rankmesh.readers.tools import slurm
from rankmesh.readers.tools.containers import Container, has_containers, is_dockerfile, read_containers
from rankmesh.readers.tools.finding import CODES, Finding, Linted
from rankmesh.readers.tools.nodes import machine_of, of_counts, of_engine
from rankmesh.readers.tools.rules import LARGEST, Checked, of_model, valid

__all__ = ["lint_files", "lint_text"]

_ENDINGS = (".sh", ".bash", ".slurm", ".sbatch", ".yaml", ".yml", ".toml", ".json", ".args", "")
_MOST_FILES = 100_000
_FOREIGN = {"node_modules", "__pycache__", "venv"}
# A file in lower case without one of these words, or a short name of an axis, states no layout.
_HINTS = ["parallel", "torchrun", "torch.distributed", "deepspeed", "zero_optimization", "fsdp", "num_processes"]
_HINTS += ["train_batch_size", "sglang", "vllm", "nnodes", "nproc_per_node", "accelerate launch"]
_AXIS = re.compile(r"[cdept]p(?<![a-z][cdept]p)(?![a-z])|par[a-z]{3,7}_(\w+_)?(size|degree)")
_IGNORED = re.compile(r"^(.*?)#\s*rankmesh:\s*ignore(?:\[([\w\s,-]*)\])?\s*$", re.MULTILINE)
# An option that is a size, in the command of a container; a key that is one, in a manifest.
_OPTION = re.compile(r"(?<!\S)--?(\w[\w-]*parallel[\w-]*size|tp([-_]size)?|tensor[-_]parallel[-_]degree)(?=[\s=])")
_SIZE_KEY = re.compile(
    r"^[\s-]*[\"']?(\w*(?:(?:tensor|pipeline|data|expert)_?parallel|_PARALLEL_SIZE|parallelism(?=[\"']?:\s*$))\w*)",
    re.MULTILINE | re.IGNORECASE,
)
_KIND = re.compile(r"^kind:\s*[\"']?(\w+)", re.MULTILINE)


def lint_files(paths: Iterable[str | os.PathLike[str]]) -> Linted:
    """Check files, and the files of folders, in the order of their names.

    Folders and files whose names begin with a dot are left out, and so are symbolic links. Raises ``PlanError`` for
    a path that does not exist, and for more than 100,000 files.
    """
    return Linted.joined(_of_file(file, named=named) for file, named in _files(paths).items())


def _of_file(file: str, *, named: bool) -> Linted:
    try:
        text = read_text(file, LARGEST)
    except Unreadable as error:
        return Linted(notes=(f"{file} {error}; not checked",) if named else ())
    if not named and not text.startswith("#!") and not Path(file).suffix and not is_dockerfile(file):
        return Linted()  # a page or a program's data
    return lint_text(text, file)


def _files(paths: Iterable[str | os.PathLike[str]]) -> dict[str, bool]:
    """Return the files to check, each with whether it was named: others are chosen by their names' endings."""
    found: dict[str, bool] = {}
    for path in [os.fspath(path) for path in paths]:
        if Path(path).is_dir():
            found |= {file: False for file in _walked(path) if file not in found}
        elif Path(path).exists():
            found[path] = True
        else:
            raise PlanError(f"there is no file or folder {path}; give one that exists", path=path)
        if len(found) > _MOST_FILES:
            raise PlanError(
                f"{path} has more than {_MOST_FILES:,} files to check; name folders inside of it", path=path
            )
    return found


def _walked(folder: str) -> Iterator[str]:
    for at, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _FOREIGN)
        for name in sorted(names):
            file = Path(at, name)
            if (file.suffix in _ENDINGS or is_dockerfile(name)) and not name.startswith(".") and not file.is_symlink():
                yield str(file)


def lint_text(text: str, path: str) -> Linted:
    """Check one text; ``path`` is for messages, and for the files that the text names beside it."""
    lowered = text.lower()
    if not any(hint in lowered for hint in _HINTS) and not _AXIS.search(lowered):
        return Linted()
    found = _read(text, path)
    of_lines, of_file = _ignored(text)
    return Linted(
        tuple(each for each in found.findings if each.code not in of_file | of_lines.get(each.line or 0, set())),
        found.notes,
        found.valid,
    )


def _ignored(text: str) -> tuple[dict[int, set[str]], set[str]]:
    """Return the codes that are ignored, by lines and in the whole file."""
    lines: dict[int, set[str]] = {}
    whole: set[str] = set()
    for found in _IGNORED.finditer(text):
        codes = set(CODES) if found[2] is None else {code.strip() for code in found[2].split(",")}
        if found[1].strip():
            lines[text.count("\n", 0, found.start()) + 1] = codes
        else:
            whole |= codes
    return lines, whole


def _read(text: str, path: str) -> Linted:
    """Check each run of a script or of containers, else the one layout of a file."""
    runs: list[tuple[Options, Container | None]] = []
    notes: list[str] = []
    try:
        with refused_as(PlanError, path, "give a file that can be read", path=path):
            if has_containers(text, path):
                for each in read_containers(text, path):
                    found_launches = launches_of(each.script, path, FLAGS)
                    runs += [(run, each) for run in found_launches]
                    notes += _ignored_options(each, path) if not found_launches else []
            elif is_script(text, path):
                runs = [(run, None) for run in launches_of(read_script(text, slurm_variables(text)), path, FLAGS)]
    except PlanError as error:
        return Linted(notes=(str(error),))
    if not runs and not is_dockerfile(path) and not is_script(text, path):
        found_here, checked = _of_layout(text, path)
        notes = [*found_here.notes, *(notes or _ignored_kinds(text, path))]
        findings_here = (*found_here.findings, *(() if checked is None else of_model(checked)))
        return Linted(findings_here, tuple(notes), () if findings_here else found_here.valid)
    asked = slurm.counts(text) if len(runs) == 1 and "hetjob" not in text else {}
    found = Linted.joined(_of_run(run, container, asked, path) for run, container in runs)
    # What leaders and workers share is found once.
    findings: dict[tuple[int | None, str], Finding] = {}
    for finding in found.findings:
        findings.setdefault((finding.line, finding.code), finding)
    notes_once, valid_once = dict.fromkeys([*notes, *found.notes]), dict.fromkeys(found.valid)
    return Linted(tuple(findings.values()), tuple(notes_once), tuple(valid_once))


def _ignored_options(container: Container, path: str) -> Iterator[str]:
    """Yield a note for each command of a container that states sizes to a program that is not read."""
    for command in container.script.commands:
        if (option := _OPTION.search(str(command))) is not None:
            words = cut(" ".join(str(command).split()))
            yield f"{path}:{command.line}: {option[0]} is of a program that is not read ({words}); not checked"


def _ignored_kinds(text: str, path: str) -> Iterator[str]:
    """Yield a note for each kind of manifest with keys that name sizes, which are not read."""
    for document in re.split(r"^---.*$", text, flags=re.MULTILINE) if path.endswith((".yaml", ".yml")) else ():
        kind, size = _KIND.search(document), _SIZE_KEY.search(document)
        if kind and size and "apiVersion:" in document and kind[1] != "CustomResourceDefinition":
            yield f"{path}: {size[1]} of a manifest of kind {kind[1]} is not read; not checked"


def _of_run(run: Options, container: Container | None, asked: Mapping[str, tuple[int, int]], path: str) -> Linted:
    """Check one run. What a container leaves open its image or its user may set: a note."""
    found, checked = _of_layout(run, path)
    machine = machine_of(run, container, asked)
    findings = [*of_counts(run, machine, checked), *found.findings]
    if checked is not None:
        findings += of_model(checked)
        findings += of_engine(run, machine, checked) if checked.layout.format in ("vllm", "sglang") else ()
    left_open = [each for each in findings if container and each.code == "unset-variable" and "$(" not in each.message]
    notes = tuple(str(each) for each in left_open)
    certain = tuple(each for each in findings if each not in left_open)
    return Linted(certain, found.notes + notes, () if certain else found.valid)


def _of_layout(given: Options | str, path: str) -> tuple[Linted, Checked | None]:
    """Read the layout of a run, or of a text; each setting that cannot be read is a finding or a note, and left out."""
    fix = f"{KNOWN}; give one of them" if isinstance(given, str) else run_it(path)
    checked: Checked | None = None
    found = Linted()
    with gathered() as problems:
        try:
            with refused_as(PlanError, path, fix, path=path):
                found, checked = _laid_out(given, path, problems)
        except PlanError as error:
            code = error.values.get("code")
            if code in CODES:
                found = Linted((_of_error(error, path),))
            elif not problems and code != NO_LAYOUT and not isinstance(error.__cause__, Invalid):
                found = Linted(notes=(str(error),))
    findings = [_of_error(error, path) for error in problems if error.values.get("code") in CODES]
    notes = [str(error) for error in problems if error.values.get("code") not in CODES][:1]
    return Linted((*findings, *found.findings), (*found.notes, *notes), found.valid), checked


def _laid_out(given: Options | str, path: str, problems: Sequence[PlanError]) -> tuple[Linted, Checked]:
    """Return the layout with why it is valid; sizes that do not fit are its problem, unless there are others."""
    options, *how = opened(given, path, {}) if isinstance(given, str) else (given,)
    layout = laid_out(options, *how)
    if not layout.known:
        unknown = no_world(options, layout)
        return Linted(notes=(str(unknown),) if unknown.runs else ()), Checked(layout)
    try:
        plan = layout.planned()
    except RankmeshError as error:
        return Linted(), Checked(layout, "" if problems else problem_of(error))
    layout = replace(layout, arguments={**layout.arguments, "world_size": plan.world_size})
    return Linted(valid=tuple(f"{path}: {line}" for line in valid(plan, layout))), Checked(layout)


def _of_error(error: PlanError, path: str) -> Finding:
    """Return the finding of an error of one setting."""
    values: Any = error.values
    message, line = str(error), values.get("line")
    for prefix in (f"{path}:{line}: ", f"{path}: "):
        message = message.removeprefix(prefix)
    return Finding(path, line, values["code"], message, values.get("fix"))
