"""What tests need and a torch may lack; they are skipped there, with the reason.

With ``RANKMESH_TEST_PUBLIC=1`` rankmesh uses torch's public API alone: tests of what only the private pieces can do are
skipped, too.
"""

import inspect
import os

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

PUBLIC = bool(os.environ.get("RANKMESH_TEST_PUBLIC"))
kept_order = pytest.mark.skipif(
    PUBLIC and "sort_ranks" not in inspect.signature(dist.new_group).parameters,
    reason="before torch 2.13: new_group sorts the members",
)
listed_keys = pytest.mark.skipif(
    not hasattr(dist.TCPStore, "list_keys"), reason="this torch's store does not list its keys"
)
# A gloo whose timeout can be set later also keeps that of a call, and reduces by what it is told.
GLOO_FOLLOWS_OPTIONS = hasattr(c10d.ProcessGroupGloo, "set_timeout")
call_timeouts = pytest.mark.skipif(
    not GLOO_FOLLOWS_OPTIONS, reason="before torch 2.9: a call of gloo has the timeout of its group"
)
try:
    from torch.distributed._mesh_layout import _MeshLayout
except ImportError:
    JOINS_APART = True
else:
    # Torch 2.10 to 2.12 slices no dimension that joins others with one between them.
    JOINS_APART = hasattr(_MeshLayout, "collapse")
meshes_of_meshes = pytest.mark.skipif(
    not hasattr(DeviceMesh, "_get_root_mesh"), reason="before torch 2.10: a slice of a DeviceMesh has no slices"
)


def private_backend(why):
    """Skip a test that needs the private pieces of torch, for this reason, where torch's public API is tested."""
    return pytest.mark.skipif(PUBLIC, reason=f"not with torch's public API alone: {why}")
