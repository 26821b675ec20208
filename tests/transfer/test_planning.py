"""Transfers planned: one answer for all ranks, what is refused, and how long it takes; their laws are in test_laws."""

import pickle
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from tests.counting import calls
from tests.transfer import live
from tests.transfer.strategies import pairs

from rankmesh.core import Mesh
from rankmesh.core.sharding import Sharding
from rankmesh.errors import PlanError
from rankmesh.transfer import Transfer


@given(pairs())
def test_the_order_of_names_does_not_matter(both):
    """Ranks that name tensors in another order plan the same moves under the same digest."""
    source, target = both
    turned = Transfer(dict(reversed(source.items())), dict(reversed(target.items())))
    moves = Transfer(source, target)
    assert turned == moves
    assert turned.digest == moves.digest
    assert all(turned.of(rank) == moves.of(rank) for rank in range(moves.world_size))
    again = pickle.loads(pickle.dumps(moves))  # noqa: S301  - our own bytes
    assert again.digest == moves.digest


def test_any_difference_is_another_digest():
    """Another cut, mesh, offset, name, dtype or stage: another digest."""
    mesh = Mesh(tp=2, dp=2)
    one = {"a": Sharding(mesh, ("tp", None), (4, 4))}
    others = [
        {"a": Sharding(mesh, (None, "tp"), (4, 4))},
        {"a": Sharding(mesh, ("dp", None), (4, 4))},
        {"a": Sharding(Mesh(tp=2, dp=2, offset=4), ("tp", None), (4, 4))},
        {"a": Sharding(mesh, ("tp", None), (4, 4), at={"dp": 1})},
        {"a": Sharding(mesh, ("tp", None), (4, 4), parts=(2, 2))},
    ]
    digests = {Transfer(one, other).digest for other in [one, *others]}
    digests |= {Transfer({"b": one["a"]}, {"b": one["a"]}).digest, Transfer(others[0], one).digest}
    assert len(digests) == 8


def test_refused():
    """Names without a source, and shapes or dtypes that differ, are refused; a further source stays where it is."""
    mesh = Mesh(tp=2)
    one, other = Sharding(mesh, ("tp",), (4,)), Sharding(mesh, (None,), (4,))
    assert Transfer({"a": one, "b": one}, {"a": other}).of(0).bytes_in == 8
    refused = [
        ({"a": one}, {"b": other}, {"missing": ("b",)}),
        ({"a": one}, {"a": Sharding(mesh, None, (5,))}, {"name": "a", "source": (4,), "target": (5,)}),
        ({"a": one}, {"a": replace(other, dtype="int8")}, {"name": "a", "source": "float32", "target": "int8"}),
        ({"a": "tp"}, {"a": other}, {"name": "a", "received": "tp"}),
        ([one], {"a": other}, {"received": [one]}),
    ]
    for source, target, values in refused:
        with pytest.raises(PlanError) as caught:
            Transfer(source, target)
        assert caught.value.values == values


@pytest.mark.parametrize("target", [Mesh(tp=8, dp=64, offset=1024), Mesh(tp=16, dp=32), Mesh(tp=4, pp=8, dp=16)])
def test_one_rank_of_405b_is_planned_in_160_calls_a_name(target):
    """631 names, 1,024 to 512 ranks: one rank's moves from shardings that nobody planned before."""
    how = {"layers": 126, "hidden": 16384, "dtype": "bfloat16"}
    source = live.model(Mesh(tp=8, dp=8, pp=16), stages=16, **how)
    wanted = live.model(target, stages=target.axes.get("pp"), **how)
    assert len(wanted) == 631
    for rank in (0, target.offset + 5, 900):
        local = Transfer(source, wanted).of(rank)
        assert local.sends or local.receives
        assert calls(lambda rank=rank: Transfer(source, wanted).of(rank)) < 160 * len(wanted)


def test_a_first_plan_loads_nothing_more():
    """Not numpy.ma, which numpy's ``unique`` loads and which takes as long as the plan."""
    program = (
        "import sys; from rankmesh import Mesh, Sharding, Transfer\n"
        "sides = [{'up': Sharding(Mesh(dp=2, tp=n), ('tp', None), shape=(8, 4))} for n in (2, 4)]\n"
        "print(Transfer(*sides).of(1).bytes_in, 'numpy.ma' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split()[1] == "False"
