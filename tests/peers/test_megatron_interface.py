"""Names, parameters and defaults of the Megatron drop-ins, beside those that stand in each release's files."""

import ast
import inspect

import pytest
from tests.peers.fetch import MEGATRON, folder

from rankmesh.dialects.megatron import ParallelState, hyper_comm_grid, process_groups_config
from rankmesh.dialects.megatron.releases import follow, parse

NAME = "as of a release"
RELEASES = pytest.mark.parametrize(
    "version", [*(pytest.param(version, marks=pytest.mark.nightly) for version in MEGATRON[:-1]), MEGATRON[-1]]
)


def source(version, module):
    """The statements of one of Megatron's files."""
    return ast.parse((folder("megatron-core", version) / f"megatron/core/{module}.py").read_text(encoding="utf-8")).body


def parameters(function):
    """Parameters of a definition with their defaults, as text: the kind of each, and whether it has one."""
    spec = function.args
    padded = [None] * (len(spec.args) - len(spec.defaults)) + list(spec.defaults)
    listed = [(arg.arg, text(default)) for arg, default in zip(spec.args, padded, strict=True)]
    keywords = [(arg.arg, text(default)) for arg, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True)]
    return listed, keywords


def text(default):
    """A default as it is written; None for a parameter without one."""
    return None if default is None else repr(ast.literal_eval(default))


def parameters_of(function):
    """The same of a function of ours."""
    given = inspect.signature(function).parameters.values()
    as_text = [
        (item.kind, (item.name, None if item.default is item.empty else repr(item.default)))
        for item in given
        if item.kind not in (item.VAR_KEYWORD, item.VAR_POSITIONAL)
    ]
    keyword = inspect.Parameter.KEYWORD_ONLY
    return [one for kind, one in as_text if kind != keyword], [one for kind, one in as_text if kind == keyword]


def check(name, theirs, ours):
    """Ours takes what theirs takes, in that order; what it takes beside comes after, and may be left out."""
    (listed, keywords), (local, new_keywords) = parameters(theirs), parameters_of(ours)
    assert local[: len(listed)] == listed, name
    assert set(keywords) <= {*new_keywords, *local[len(listed) :]}, name
    assert all(default is not None for _, default in (*local[len(listed) :], *new_keywords)), name


def state_of(version):
    """A parallel state as of a release."""
    state = ParallelState(NAME)
    follow(state, parse(version))
    return state


@RELEASES
def test_functions(version):
    """Each function and class of the release's parallel_state takes what it takes there."""
    state = state_of(version)
    theirs = {node.name: node for node in source(version, "parallel_state") if hasattr(node, "name")}
    for name, node in theirs.items():
        if isinstance(node, ast.FunctionDef):
            check(name, node, getattr(state, name))
        for method in getattr(node, "body", ()) if isinstance(node, ast.ClassDef) else ():
            if isinstance(method, ast.FunctionDef):
                check(f"{name}.{method.name}", method, getattr(getattr(state, name), method.name))


@RELEASES
def test_globals(version):
    """Each global of the release, with its first value."""
    state = state_of(version)
    values = {}
    for node in source(version, "parallel_state"):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id[0] == "_":
            values[node.targets[0].id] = ast.literal_eval(node.value)
    assert {name: getattr(state, name) for name in values} == values


@RELEASES
def test_collections(version):
    """The classes of the release's process_groups_config, and their fields in order."""
    for node in source(version, "process_groups_config"):
        if isinstance(node, ast.FunctionDef):
            check(node.name, node, getattr(process_groups_config, node.name))
        if isinstance(node, ast.ClassDef) and node.name != "ProcessGroupHelperMeta":
            ours = getattr(process_groups_config, node.name)
            fields = [part.target.id for part in node.body if isinstance(part, ast.AnnAssign)]
            assert [name for name in ours.__dataclass_fields__ if name in fields] == fields, node.name


@RELEASES
def test_grids(version):
    """What the methods of the release's HyperCommGrid take."""
    (grid,) = (node for node in source(version, "hyper_comm_grid") if getattr(node, "name", "") == "HyperCommGrid")
    for method in grid.body:
        if isinstance(method, ast.FunctionDef) and method.name not in WITHIN:
            check(method.name, method, getattr(hyper_comm_grid.HyperCommGrid, method.name))


# How Megatron's own methods part their work; none of its code, and none of its tests, calls them.
WITHIN = {"_canonical_pg_key_and_enum_view", "_is_base_pg_key", "_order_dims_for_view", "_resolve_view"}
