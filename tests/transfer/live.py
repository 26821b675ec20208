"""What the ranks of live tests do: make shards of numbered elements, run a transfer, and look at what came."""

import numpy as np
import torch
from tests.transfer import brute

from rankmesh.core import Mesh
from rankmesh.core.sharding import Sharding
from rankmesh.transfer import Transfer


def numbered(sharding, rank, shift=0):
    """The shard of a rank: each element is its number in the whole tensor plus a shift, cast to the dtype."""
    mine = brute.local(sharding, rank)
    return None if mine is None else torch.tensor(mine + shift, dtype=torch.float64).to(getattr(torch, sharding.dtype))


def shards(shardings, rank, version=0):
    """The shards of a rank by name, of those that it has; of a version each element is larger by its number."""
    made = {name: numbered(s, rank, shift) for shift, (name, s) in enumerate(sorted(shardings.items()), version)}
    return {name: tensor for name, tensor in made.items() if tensor is not None}


def wrong(into, shardings, rank, version=0):
    """Names whose elements are not what they should be; padding may be anything."""
    bad = []
    for name, expected in shards(shardings, rank, version).items():
        real = torch.from_numpy(np.asarray(brute.local(shardings[name], rank) >= 0))
        got, wanted = (bytes_of(tensor)[real] for tensor in (into[name], expected))
        if not torch.equal(got, wanted):
            bad.append(name)
    return bad


def bytes_of(tensor):
    """The bytes of each element, in a last dimension: torch compares and selects them, whatever the dtype."""
    listed = tensor.reshape(-1).clone(memory_format=torch.contiguous_format)
    return listed.view(torch.uint8).reshape(*tensor.shape, tensor.element_size())


def model(mesh, *, layers=4, hidden=64, stages=None, dtype="float32"):
    """Shardings of a small transformer on a mesh with tp, and pp where ``stages`` says so."""
    made = {}
    for layer in range(layers):
        at = {"pp": layer * stages // layers} if stages else None
        for name, shape, cut, parts in (
            ("qkv", (3 * hidden, hidden), ("tp", None), (2 * hidden, hidden // 2, hidden // 2)),
            ("out", (hidden, hidden), (None, "tp"), None),
            ("up", (4 * hidden, hidden), ("tp", None), None),
            ("down", (hidden, 4 * hidden), (None, "tp"), None),
            ("norm", (hidden,), (None,), None),
        ):
            made[f"{layer}.{name}"] = Sharding(mesh, cut, shape, dtype, at, parts=parts)
    made["embedding"] = Sharding(mesh, ("tp", None), (1000, hidden), dtype, {"pp": 0} if stages else None)
    return made


def refit(hidden=64, dtype="float32"):
    """TP4·PP2·DP2 on ranks 0 to 15 to TP2·DP4 on ranks 0 to 7."""
    source = model(Mesh(tp=4, dp=2, pp=2), stages=2, hidden=hidden, dtype=dtype)
    return Transfer(source, model(Mesh(tp=2, dp=4), hidden=hidden, dtype=dtype))
