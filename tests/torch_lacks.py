"""What tests need and a torch may lack; they are skipped there, with the reason."""

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

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
