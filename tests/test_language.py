"""The words of messages, docstrings and names: plain English, and the words of the field."""

import ast
import re
from pathlib import Path

import pytest

import rankmesh

ROOT = Path(__file__).parents[1]
PACKAGES = (Path(rankmesh.__file__).parent, ROOT / "packages" / "rankmesh-engines" / "src")
SOURCES = sorted(path for folder in PACKAGES for path in folder.rglob("*.py"))


# Phrases that send a reader back to another sentence, or that are not plain English.
PHRASES = {
    'name the thing, not "that of"': r"\b[Tt](?:hat|hose) of\b",
    'name the subject, not "The same"': r"^The same\b",
    'write "is not a", or "without"': r"\b(?:is|are|was|were) no \w+[;,.:]",
    "begin a message with what is wrong": r"^(?:.*: )?received ",
    "begin with a verb or a noun": r"^(?:Of an? |Whoever |Return the number counts)",
    "name who does it: a member, a rank": r"\b(?:[Ww]hoever stood|of those that work|is left behind when)\b",
    "name the rank that diverged": r"\b(?:decided by the most|first left the order|would seem to wait)\b",
    "write plain English": r"\b(?:[Ss]o many of|numbers never came|there and back)\b",
}


def _phrases(source):
    """The lines of a module's texts with a phrase to replace, and what to do instead."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = " ".join(node.value.split())
            yield from ((node.lineno, fix) for fix, phrase in PHRASES.items() if re.search(phrase, text))


def test_docstrings_and_messages_are_plain():
    """No docstring and no message has a phrase that must be read twice."""
    found = {str(path): hits for path in SOURCES if (hits := list(_phrases(path.read_text(encoding="utf-8"))))}
    assert len(SOURCES) > 100
    assert found == {}


@pytest.mark.parametrize(
    "text",
    [
        "The size is that\n    of the plan.",
        "The same, for a view.",
        "Raise if there is no rank.",
        "8 are no ranks; give 4",
        "job.yaml: received 8 ranks ",
        "Who is odd is decided by the most.",
    ],
)
def test_a_phrase_is_found(text):
    """In a docstring across lines, and in the parts of an f-string."""
    assert len(list(_phrases(f'def size():\n    """{text}"""\n'))) == 1
    assert len(list(_phrases(f'raise ValueError(f"""{text}{{size}}""")'))) == 1


# -- identifiers -----------------------------------------------------------------------------------

# Words that were names of ours, with the word of the field. A part of an identifier or file name counts. Not here:
# what the field uses, too (line, cell, turn, phase, choice, word, left; `roll` of torch and numpy), and `crosswise`,
# which is a cause in `doctor --json`.
FIELD = {
    "round": "muster musters meeting meetings claim claims",
    "publish, gather": "say says said tell tells told hear hears heard notice notices",
    "side channel": "board posts",
    "rendezvous key": "entrance entrances",
    "capabilities": "offer offers",
    "outcome, diagnosis": "verdict verdicts",
    "coordinator": "judge judges",
    "participants, cycle": "circle circles",
    "epoch": "generation generations",
    "unresponsive": "silent",
    "heartbeats": "lifeline lifelines beat beats",
    "event log": "diary diaries",
    "local": "own",
    "canonical group": "leader leaders",
    "counterpart": "twin twins",
    "rank range": "span spans",
    "single rank": "alone",
    "registry": "held",
    "ranks on this host": "sibling siblings",
    "dump request": "inquiry inquiries asking",
    "verify": "prove proves proved proof proofs",
    "scheduler token": "baton",
    "channel, pending operation, rank context, failure": "room rooms ticket tickets seat seats complaint complaints",
    "unresolved, ignored": "doubt doubts unread",
    "sharded alike": "lies alike",
    "fix": "mend mends mended",
}
OLD = {old: new for new, words in FIELD.items() for old in words.split()}
# Names that stay, each with its reason.
KEPT = {
    "verdict": "a key of `doctor --json` and `check --json`",
    "meeting": "a key of `where --json`",
    "proved": "a key of `check --json`",
    "spans": "a key of `diff --json`",
    "ProofError": "a public error",
    **dict.fromkeys(
        ["start_span", "set_span_in_context", "get_finished_spans", "add_span_processor"], "OpenTelemetry's"
    ),
    **dict.fromkeys(["BatchSpanProcessor", "InMemorySpanExporter", "in_memory_span_exporter"], "OpenTelemetry's"),
}
# Names of test functions are sentences, in which these are English.
IN_SENTENCES = {"own", "alone", "say", "says"}


def _python_names(source):
    """The identifiers of a module."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Global, ast.Nonlocal)):
            found.update(node.names)
        elif not isinstance(node, ast.Constant):
            found.update(name for name in vars(node).values() if type(name) is str and name.isidentifier())
    return found


_TYPESCRIPT = re.compile(
    r"""/\*.*?\*/ | //[^\n]* | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*'
    | (?P<template>`(?:\\.|[^`\\])*`) | (?P<name>[A-Za-z_$][\w$]*)""",
    re.DOTALL | re.VERBOSE,
)


def _typescript_names(source):
    """The identifiers of a module outside of comments and texts; those of a template's expressions count."""
    found = set()
    for token in _TYPESCRIPT.finditer(source):
        if token["name"]:
            found.add(token["name"])
        elif token["template"]:
            found |= {
                name for part in re.findall(r"\$\{([^}]*)\}", token["template"]) for name in _typescript_names(part)
            }
    return found


def _old_words(names):
    """The names of which a part is a word of the old column, and that word."""
    for name in sorted(names - KEPT.keys()):
        parts = set(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_")) & OLD.keys()
        yield from ((name, part) for part in parts - (IN_SENTENCES if name.startswith("test_") else set()))


def test_names_are_the_fields_words():
    """No identifier and no file has a name that a reader would have to learn here: the field has a word for it."""
    folders = [ROOT / name for name in ("src", "packages", "tests", "bench", "examples", "explorer/src")]
    paths = [path for folder in folders for path in sorted((*folder.rglob("*.py"), *folder.rglob("*.ts")))]
    assert len(paths) > 400
    assert {path.suffix for path in paths} == {".py", ".ts"}
    found = []
    for path in paths:
        names = (_python_names if path.suffix == ".py" else _typescript_names)(path.read_text(encoding="utf-8"))
        found += [
            f"{path.relative_to(ROOT)}: {name}; the field's word is {OLD[word]}"
            for name, word in _old_words(names | {path.stem})
        ]
    assert found == []
