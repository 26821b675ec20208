"""Every value of a document with the line of its key, whatever the document looks like."""

import json
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.counting import calls

from rankmesh import PlanError
from rankmesh.readers.documents import read_document

VALUES = st.one_of(
    st.integers(-(10**6), 10**6),
    st.booleans(),
    st.text(st.characters(codec="utf-8", max_codepoint=0xFFFF), max_size=6),
    st.lists(st.integers(0, 9), max_size=3),
)
TREES = st.recursive(VALUES, lambda inner: st.lists(inner, min_size=1, max_size=4).map(tuple), max_leaves=20)


def named(tree, numbers):
    """A tree of tuples as nested mappings whose keys are all different, some in need of quotes."""
    if not isinstance(tree, tuple):
        return tree
    return {(f"k{n}" if n % 3 else f"k {n}.é"): named(inner, numbers) for inner, n in zip(tree, numbers, strict=False)}


def leaves(value, path=()):
    """The values that are no mappings, with their paths."""
    if not isinstance(value, dict):
        return [(path, value)]
    return [leaf for name, inner in value.items() for leaf in leaves(inner, (*path, name))]


def line_of(name, text):
    """The line on which a key stands first; keys are unique, and no value looks like one."""
    return next(number for number, line in enumerate(text.split("\n"), 1) if json.dumps(name) in line)


@given(st.lists(TREES, min_size=1, max_size=4).map(tuple), st.sampled_from([None, 0, 2]), st.booleans())
def test_json(tree, indent, ascii_only):
    """JSON in any spelling gives its values in order, each on the line of its key."""
    document = named(tree, count())
    text = json.dumps(document, indent=indent, ensure_ascii=ascii_only)
    found = read_document(text, "a.json")
    assert [(entry.path, entry.value) for entry in found] == leaves(document)
    plain = json.dumps(document, indent=indent)  # where é is written as in line_of
    assert [entry.line for entry in found] == [line_of(entry.path[-1], plain) for entry in found]


def toml(document, style, path=()):
    """A nested mapping as TOML: tables, inline tables or dotted keys, as ``style`` says in turn."""
    tables = []
    for name, value in document.items():
        if not isinstance(value, dict):
            yield f"{json.dumps(name)} = {json.dumps(value)}"
        elif next(style) % 3 == 0:
            tables.append((name, value))
        elif next(style) % 2:
            yield f"{json.dumps(name)} = {inline(value)}"
        else:
            yield from (
                f"{'.'.join(map(json.dumps, (name, *way)))} = {json.dumps(leaf)}" for way, leaf in leaves(value)
            )
    for name, value in tables:
        yield f"\n[{'.'.join(map(json.dumps, (*path, name)))}]  # a comment"
        yield from toml(value, style, (*path, name))


def inline(value):
    """A mapping as an inline table."""
    if not isinstance(value, dict):
        return json.dumps(value)
    return "{" + ", ".join(f"{json.dumps(name)} = {inline(inner)}" for name, inner in value.items()) + "}"


@given(st.lists(TREES, min_size=1, max_size=4).map(tuple), st.lists(st.integers(0, 5), min_size=1, max_size=9))
def test_toml(tree, style):
    """TOML in tables, inline tables and dotted keys gives its values, each on the line that names it."""
    document = named(tree, count())
    turns = (style[n % len(style)] for n in count())
    text = "\n".join(toml(document, turns)) + "\n"
    found = read_document(text, "a.toml")
    assert sorted((entry.path, json.dumps(entry.value)) for entry in found) == sorted(
        (path, json.dumps(value)) for path, value in leaves(document)
    )
    assert [entry.line for entry in found] == [line_of(entry.path[-1], text) for entry in found]
    assert [entry.line for entry in found] == sorted(entry.line for entry in found)


def test_what_looks_like_a_key_is_none():
    """Texts of several lines, comments, and the lines of a list begin no table and have no key."""
    text = 'a = """\n[b]\ntp = 1\n"""\n# tp = 2\n[b]\nm = [\n  [1], # ]\n  ["]"],\n]\n'
    text += '"x.y".tp = 4\nc = "d = [" # e\nf = {g = 1}\n'
    assert {entry.key: entry.line for entry in read_document(text, "a.toml")} == {
        "a": 1, "b.m": 7, "b.x.y.tp": 11, "b.c": 12, "b.f.g": 13,
    }  # fmt: skip
    # A list of tables is one value, on the line of its first table; an empty table is none.
    found = read_document("[a]\n\n[[t.u]]\nk = 1\n[[t.u]]\nk = 2\n[t.u.v]\nw = 3\n[b]\nc = 4\n", "a.toml")
    assert [(str(entry.key), entry.line) for entry in found] == [("t.u", 3), ("b.c", 10)]
    text = '{"a": "\\"b\\": {", "l": [{"c": 1},\n{"c": 2}],\n\t"d": {"c": 3, "c": 4}}'
    assert [(entry.key, entry.value, entry.line) for entry in read_document(text, "a.json")] == [
        ("a", '"b": {', 1), ("l", [{"c": 1}, {"c": 2}], 1), ("d.c", 3, 3), ("d.c", 4, 3),
    ]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("ending", ["json", "toml"])
def test_the_work_is_that_of_one_reading(ending):
    """Twenty times the tables take twenty times the calls: 4,000 tables, 20,000 values."""

    def work(tables):
        if ending == "json":
            text = json.dumps({f"t{n}": {f"k{k}": k for k in range(5)} for n in range(tables)}, indent=1)
        else:
            text = "\n".join(f"[t{n}]\n" + "\n".join(f"k{k} = {k}" for k in range(5)) for n in range(tables))
        assert len(read_document(text, f"a.{ending}")) == 5 * tables  # and a first time, with what is loaded then
        return calls(lambda: read_document(text, f"a.{ending}"))

    assert work(4000) < 22 * work(200)


@pytest.mark.parametrize("text", ['{"a": NaN}', '{"a": [Infinity]}', '{"a": -Infinity}'])
def test_what_only_python_reads_is_no_json(text):
    """Numbers that JSON has not are refused, rather than lost."""
    with pytest.raises(PlanError, match=r"is not JSON"):
        read_document(text, "a.json")
