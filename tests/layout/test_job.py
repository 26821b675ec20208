import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmesh import Job, LayoutError, Mesh, UnknownAxis


def test_disjoint_and_equal_meshes():
    """A rank is in one of several disjoint meshes, with its own coordinate, and in all of several equal ones."""
    job = Job(world_size=48, encoder=Mesh(tp=2, dp=8), llm=Mesh(tp=4, dp=4, pp=2, offset=16))
    assert [job.of(rank) for rank in (0, 15, 16, 47)] == [("encoder",), ("encoder",), ("llm",), ("llm",)]
    assert job["llm"].coordinate(20) == {"tp": 0, "dp": 1, "pp": 0}
    assert list(job) == ["encoder", "llm"]
    assert Job(world_size=8, actor=Mesh(tp=2, dp=4), critic=Mesh(dp=8)).of(5) == ("actor", "critic")


def test_partial_is_explicit():
    """Idle ranks are refused unless the job says partial=True; the error lists them."""
    meshes = {"one": Mesh(dp=2, offset=1), "two": Mesh(dp=2, offset=5)}
    with pytest.raises(LayoutError, match="leave out ranks 0 to 0, 3 to 4, 7 to 8 of 9") as caught:
        Job(world_size=9, **meshes)
    assert caught.value.free == ((0, 0), (3, 4), (7, 8))
    job = Job(world_size=9, partial=True, **meshes)
    assert job.partial
    assert job.of(4) == ()


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 6)), min_size=2, max_size=3))
def test_overlap_is_refused(rank_ranges):
    """Two meshes that share some ranks but not all are refused, and only those."""
    meshes = {f"m{i}": Mesh(dp=size, offset=start) for i, (start, size) in enumerate(rank_ranges)}
    covered = [set(range(start, start + size)) for start, size in rank_ranges]
    clash = any(one & other and one != other for one in covered for other in covered)
    if clash:
        with pytest.raises(LayoutError, match=r"overlap on \d+ of their ranks"):
            Job(world_size=12, partial=True, **meshes)
    else:
        job = Job(world_size=12, partial=True, **meshes)
        for rank in range(12):
            assert job.of(rank) == tuple(name for name, ranks in zip(meshes, covered, strict=True) if rank in ranks)


def test_equality_counts_world_meshes_and_idle_ranks():
    """Jobs are equal when world and meshes are."""
    assert Job(world_size=4, a=Mesh(dp=4)) == Job(world_size=4, a=Mesh(dp=4))
    assert hash(Job(world_size=4, a=Mesh(dp=4))) == hash(Job(world_size=4, a=Mesh(dp=4)))
    assert Job(world_size=4, a=Mesh(dp=4)) != Job(world_size=4, a=Mesh(tp=4))


def test_unknown_mesh():
    """A mesh that the job does not have is named with those it has."""
    with pytest.raises(UnknownAxis, match="unknown mesh 'lm': this job has the meshes llm; did you mean 'llm'"):
        Job(world_size=8, llm=Mesh(dp=8))["lm"]
