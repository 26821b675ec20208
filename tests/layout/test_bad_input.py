"""Each bad input: the error's type, the value received in its message, and the values as attributes."""

import pickle

import pytest

from rankmesh import (
    AgreementError,
    ConnectError,
    LayoutError,
    Mesh,
    NotAMember,
    Pick,
    PlanError,
    ProofError,
    RankmeshError,
    UnknownAxis,
    UnknownGroup,
)

LINE = Mesh(tp=2, dp=4)
SHIFTED = Mesh(dp=4, offset=4)


@pytest.mark.parametrize(
    ("error", "built_in"),
    [
        (LayoutError, ValueError),
        (UnknownAxis, KeyError),
        (PlanError, ValueError),
        (UnknownGroup, KeyError),
        (AgreementError, RuntimeError),
        (ConnectError, RuntimeError),
        (ProofError, RuntimeError),
        (NotAMember, LookupError),
    ],
)
def test_tree(error, built_in):
    """Every error is a RankmeshError and the built-in that fits."""
    assert issubclass(error, RankmeshError)
    assert issubclass(error, built_in)


def test_errors_print_their_sentence_and_survive_pickle():
    """A KeyError prints its sentence, not a repr, and values survive a trip between processes."""
    error = UnknownAxis("dpp", known=("tp", "dp"))
    assert str(error) == "unknown axis 'dpp': this mesh has the axes tp, dp; did you mean 'dp'?"
    other = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert (type(other), str(other), other.name, other.known) == (
        UnknownAxis,
        str(error),
        "dpp",
        ("tp", "dp"),
    )
    with pytest.raises(AttributeError, match="UnknownAxis has no attribute 'rank'"):
        _ = error.rank


@pytest.mark.parametrize("size", [0, -2, 2.0, 2.5, "2", None, True, float("nan")])
def test_sizes(size):
    """A size is an integer of at least 1: zero, negatives, floats, strings and booleans are refused."""
    with pytest.raises(LayoutError) as caught:
        Mesh(tp=2, dp=size)
    assert str(caught.value) == f"size of axis 'dp' is {size!r}; give an integer of at least 1"
    assert caught.value.least == 1
    assert repr(caught.value.received) == repr(size)


@pytest.mark.parametrize("offset", [-1, 1.0, "0", None])
def test_offsets(offset):
    """An offset is an integer of at least 0."""
    with pytest.raises(LayoutError, match=f"offset is {offset!r}; "):
        Mesh(dp=2, offset=offset)


@pytest.mark.parametrize("name", ["data-parallel", "2d", "", "view", "shared", "a b"])
def test_axis_names(name):
    """An axis name is an identifier that is no argument of the mesh."""
    with pytest.raises(LayoutError, match=f"^{name!r} cannot name an axis") as caught:
        Mesh(**{name: 2})
    assert caught.value.received == name


def test_a_mesh_has_axes():
    """A mesh without axes is refused."""
    with pytest.raises(LayoutError, match="the mesh has no axes"):
        Mesh()


@pytest.mark.parametrize("rank_map", [[0, 1, 2], [0, 1, 2, 2], [1, 2, 3, 4], [0.0, 1.0, 2.0, 3.0], ["a"] * 4, []])
def test_rank_maps(rank_map):
    """A rank map lists each rank of the span exactly once."""
    with pytest.raises(LayoutError, match=f"has {len(rank_map)} entries for a mesh of 4 ranks;"):
        Mesh(tp=2, dp=2, rank_map=rank_map)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp", "'tp' in 'tp' is no axis"),
        ("", "'' in '' is no axis"),
        ("tp=2,", "'' in 'tp=2,' is no axis"),
        ("tp=", "'tp=' in 'tp=' is no axis"),
        ("tp=2,tp=2", "'tp=2,tp=2' names axis 'tp' twice"),
        ("tp=two", "size 'two' in 'tp=two' is no whole number"),
        ("tp=2.0", r"size '2\.0' in 'tp=2\.0' is no whole number"),
        ("tp=0", "size of axis 'tp' is 0"),
        ("tp=-4", "size of axis 'tp' is -4"),
        ("tp=*,dp=*", r"\* stands for tp and dp"),
        ("tp=*", r"tp=\* cannot be inferred without world_size"),
        ("tp=2;dp=2", "size '2;dp=2' in 'tp=2;dp=2' is no whole number"),
    ],
)
def test_axis_strings(text, message):
    """Each mistake in an axis string is named."""
    with pytest.raises(LayoutError, match=message):
        Mesh.parse(text)


def test_sizes_that_do_not_divide():
    """What is left must be whole; the error holds the total and the product."""
    with pytest.raises(LayoutError, match=r"tp=4 does not divide, so dp=\* has no size") as caught:
        Mesh.parse("tp=4,dp=*", world_size=10)
    assert (caught.value.total, caught.value.product) == (10, 4)


def test_a_product_that_is_not_the_world():
    """Sizes without a star must multiply to the world, larger and smaller alike."""
    for world in (4, 16):
        with pytest.raises(LayoutError, match=f"world_size is {world}, but tp 2 x dp 4 = 8") as caught:
            Mesh.parse("tp=2,dp=4", world_size=world)
        assert (caught.value.total, caught.value.product) == (world, 8)


def test_an_offset_beyond_the_world():
    """No rank is left for a mesh that starts at the end of the world."""
    with pytest.raises(LayoutError, match="world_size minus offset is 0"):
        Mesh.parse("dp=*", world_size=4, offset=4)


@pytest.mark.parametrize("axes", ["tp-tp-dp", ("tp", "tp", "dp")])
def test_duplicate_axes(axes):
    """An axis named twice is refused, in a string and in a sequence."""
    with pytest.raises(LayoutError, match="axes 'tp-tp-dp' name 'tp' twice") as caught:
        LINE.groups(axes)
    assert caught.value.axis == "tp"


@pytest.mark.parametrize("axes", ["", "tp-", "-tp", ("tp", 2), ("tp", "")])
def test_malformed_axes(axes):
    """Axes are names joined by hyphens."""
    with pytest.raises(LayoutError, match="write names joined by hyphens") as caught:
        LINE.groups(axes)
    assert caught.value.received == axes


@pytest.mark.parametrize(
    "query",
    [
        lambda name: LINE.groups(name),
        lambda name: LINE.groups(f"tp-{name}"),
        lambda name: LINE.rank(tp=0, dp=0, **{name: 0}),
        lambda name: LINE.split(name, one=1),
        lambda name: LINE.reorder(f"tp-dp-{name}"),
    ],
)
def test_unknown_axes(query):
    """An axis that the mesh does not have is named, with the axes it has and the nearest one."""
    with pytest.raises(UnknownAxis, match="unknown axis 'dpp': this mesh has the axes tp, dp") as e:
        query("dpp")
    assert (e.value.name, e.value.known) == ("dpp", ("tp", "dp"))


@pytest.mark.parametrize("query", [SHIFTED.coordinate, SHIFTED.groups("dp").of, SHIFTED.groups("dp").index_of])
@pytest.mark.parametrize("rank", [0, 3, 8, 10**6])
def test_ranks_outside(query, rank):
    """A rank outside the span is refused with the span."""
    with pytest.raises(LayoutError, match=f"rank {rank} is outside this mesh, which covers ranks 4 to 7") as caught:
        query(rank)
    assert (caught.value.rank, caught.value.first, caught.value.last) == (rank, 4, 7)


@pytest.mark.parametrize("rank", [-1, 5.0, "5", None, True])
def test_ranks_that_are_none(rank):
    """A rank is an integer of at least 0."""
    with pytest.raises(LayoutError, match=f"rank is {rank!r}; "):
        SHIFTED.coordinate(rank)


def test_coordinates():
    """A coordinate has every axis of several ranks, each inside its size."""
    with pytest.raises(LayoutError, match="position 4 along axis 'dp' does not exist: its size is 4") as caught:
        LINE.rank(tp=0, dp=4)
    assert (caught.value.axis, caught.value.received, caught.value.size) == ("dp", 4, 4)
    with pytest.raises(LayoutError, match="the coordinate has no position along 'dp'") as caught:
        LINE.rank(tp=0)
    assert caught.value.missing == "dp"
    with pytest.raises(LayoutError, match="position along axis 'tp' is -1"):
        LINE.rank(tp=-1, dp=0)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({}, "axis 'dp' is split into nothing"),
        ({"a": 3, "b": ...}, r"size of axis 'dp' is 4, which a=3 does not divide, so b=\* has no size"),
        ({"a": 3, "b": 2}, "size of axis 'dp' is 4, but a 3 x b 2 = 6"),
        ({"a": ..., "b": ...}, r"\* stands for a and b"),
        ({"a": 0, "b": ...}, "size of axis 'a' is 0"),
        ({"tp": 2, "b": 2}, "sub-axis 'tp' of 'dp' has the name of another axis of the mesh"),
        ({"dp": 4}, "sub-axis 'dp' of 'dp' has the name of another axis of the mesh"),
    ],
)
def test_splits(sizes, message):
    """Sub-axes have new names and multiply to the axis."""
    with pytest.raises(LayoutError, match=message):
        LINE.split("dp", **sizes)


@pytest.mark.parametrize(
    ("widths", "level", "message"),
    [
        ((3, 2), 0, r"level sizes \(3, 2\) have the product 6, but groups along dp have 4 ranks"),
        ((2, 2), 2, r"level 2 of \(2, 2\) does not exist"),
        ((2, 2), -1, "level is -1"),
        ((0, 4), 0, "size of a level is 0"),
        ((4.0,), 0, r"size of a level is 4\.0"),
    ],
)
def test_levels(widths, level, message):
    """Levels multiply to the group, and the level asked for is one of them."""
    with pytest.raises(LayoutError, match=message):
        LINE.groups("dp").level_of(widths, level)


@pytest.mark.parametrize(
    ("pick", "message"),
    [
        ([4], "a pick has position 4, but groups have 4 ranks"),
        ([-5], "a pick has position -5, but groups have 4 ranks"),
        ([], r"pick \[\] chooses no position"),
        ([1.5], r"pick \[1\.5\] gives \[1\.5\]"),
        (3, "pick 3 gives 3"),
        (lambda ranks: None, "gives None"),
        (lambda ranks: [len(ranks)], "a pick has position 4, but groups have 4 ranks"),
    ],
)
def test_picks(pick, message):
    """A pick chooses at least one position, by integers inside the group."""
    with pytest.raises(LayoutError, match=message):
        LINE.groups("dp").pick(pick)


@pytest.mark.parametrize("positions", [(), (1.5,), ("a",), 3])
def test_a_pick_is_checked_when_it_is_made(positions):
    """A Pick made by hand obeys the same rule."""
    with pytest.raises(LayoutError, match="pick"):
        Pick(positions)


@pytest.mark.parametrize(
    "change",
    [
        {"axes": [["tp", 2], ["tp", 4]]},
        {"axes": [["tp", 0]]},
        {"views": {"expert": {"axes": [["ep", 3]]}}},
        {"parts": {"cp": ["inner"]}},
        {"parts": {"tp": ["dp"]}},
        {"parts": {"cp": []}},
        {"rank_map": [0, 0]},
        {"offset": -1},
    ],
)
def test_saved_meshes_are_checked(change):
    """Plain data that is no mesh is refused as the constructor would."""
    with pytest.raises(LayoutError):
        Mesh.from_dict({**LINE.to_dict(), **change})
