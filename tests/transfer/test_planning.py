"""Transfers planned: one answer for all ranks, what is refused, and how long it takes; their laws are in test_laws."""

import pickle
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from tests.counting import calls
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


def test_nothing_moves_between_equal_layouts():
    """A layout to itself is copies only, and a rank outside both takes no part."""
    same = {"a": Sharding(Mesh(tp=2, dp=2), ("tp", None), (4, 4))}
    moves = Transfer(same, same)
    assert (moves.bytes, moves.lower_bound, moves.sender_bound) == (0, 0, 0)
    assert moves.of(1).bytes_copied == 32
    assert moves.of(9).copies == ()


def _llama_405b(mesh, stage):
    """Every weight of Llama 3 405B on a mesh; ``stage`` says where a layer is."""
    hidden, units = 16384, 53248
    layer_shapes = {
        "self_attn.q_proj": ((hidden, hidden), ("tp", None)),
        "self_attn.k_proj": ((1024, hidden), ("tp", None)),
        "self_attn.v_proj": ((1024, hidden), ("tp", None)),
        "self_attn.o_proj": ((hidden, hidden), (None, "tp")),
        "mlp.gate_proj": ((units, hidden), ("tp", None)),
        "mlp.up_proj": ((units, hidden), ("tp", None)),
        "mlp.down_proj": ((hidden, units), (None, "tp")),
        "input_layernorm": ((hidden,), (None,)),
        "post_attention_layernorm": ((hidden,), (None,)),
    }
    made = {
        f"model.layers.{layer}.{name}.weight": Sharding(mesh, cut, shape, "bfloat16", stage(layer))
        for layer in range(126)
        for name, (shape, cut) in layer_shapes.items()
    }
    made["model.embed_tokens.weight"] = Sharding(mesh, ("tp", None), (128256, hidden), "bfloat16", stage(0))
    made["model.norm.weight"] = Sharding(mesh, (None,), (hidden,), "bfloat16", stage(125))
    made["lm_head.weight"] = Sharding(mesh, ("tp", None), (128256, hidden), "bfloat16", stage(125))
    return made


@pytest.mark.parametrize("target", [Mesh(tp=8, dp=64, offset=1024), Mesh(tp=16, dp=32), Mesh(tp=4, pp=8, dp=16)])
def test_one_rank_of_405b_is_planned_in_a_hundred_calls_a_name(target):
    """1,137 names, 1,024 to 512 ranks: one rank's moves from shardings that nobody planned before."""
    stages = {"pp": 8} if "pp" in target.axes else {}
    source = _llama_405b(Mesh(tp=8, dp=8, pp=16), lambda layer: {"pp": layer * 16 // 126})
    wanted = _llama_405b(target, lambda layer: {"pp": layer * 8 // 126} if stages else None)
    assert len(wanted) == 1137
    for rank in (0, target.offset + 5, 900):
        local = Transfer(source, wanted).of(rank)
        assert local.sends or local.receives
        assert calls(lambda rank=rank: Transfer(source, wanted).of(rank)) < 100 * len(wanted)


def test_a_first_plan_loads_nothing_more():
    """Not numpy.ma, which numpy's ``unique`` loads and which takes as long as the plan."""
    program = (
        "import sys; from rankmesh import Mesh, Sharding, Transfer\n"
        "sides = [{'up': Sharding(Mesh(dp=2, tp=n), ('tp', None), shape=(8, 4))} for n in (2, 4)]\n"
        "print(Transfer(*sides).of(1).bytes_in, 'numpy.ma' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split()[1] == "False"
