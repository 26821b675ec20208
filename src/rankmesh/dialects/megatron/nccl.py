"""Options of communicators in Megatron's words: its YAML, its dictionaries, high-priority groups, SHARP, UCC.

```yaml
dp_cp:
  max_ctas: 16
  cga_cluster_size: 4
  is_high_priority_stream: true
```
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path

from rankmesh.backend.options import nccl_options
from rankmesh.core.nccl_config import nccl_sections
from rankmesh.core.options import NcclValue, Options
from rankmesh.dialects.megatron.refusals import Refused, UnknownName
from rankmesh.dialects.megatron.table import CONFIG_KEYS, SECTIONS_OF_PIECES

__all__ = ["get_nccl_options", "overwrite_nccl_comm_cfgs", "prepare_ucc", "read_config", "section_of", "sharp_kind"]

_HIGH_PRIORITY = "is_high_priority_stream"
_SHARP = {"dp": "dp_cp", "dp_replica": "inter_ep_dp"}

# What UCC's pipeline groups need: what the user set stays, where Megatron-Core lets it stay.
_UCC_UNLESS_SET = {
    "TORCH_UCC_BLOCKING_WAIT": "none",
    "UCC_EC_CUDA_STREAM_TASK_MODE": "driver",
    "UCX_TLS": "ib,cuda_copy",
}
_UCC_ALWAYS = {
    "NSYS_UCP_COMM_PARAMS": "1",
    "UCX_RNDV_THRESH": "0",
    "UCX_NET_DEVICES": "all",
    "UCC_CL_BASIC_TLS": "^sharp,nccl",
}


def section_of(kind: str) -> str | None:
    """Return the section of an NCCL configuration for a group: dp_cp for hybrid and all-gather groups, none for gloo.

    >>> section_of("hybrid_dp_cp_4"), section_of("hcp_0"), section_of("dp_gloo"), section_of("tp")
    ('dp_cp', 'hcp', None, 'tp')
    """
    if kind.endswith("_gloo"):
        return None
    if kind.startswith("hybrid_dp_cp_") or kind == "dp_cp_ag":
        return "dp_cp"
    if kind == "expt_dp_ag":
        return "ep_dp"
    return "hcp" if kind.startswith("hcp_") else SECTIONS_OF_PIECES.get(kind, kind)


def sharp_kind(group: str) -> str:
    """Return the group of the plan that SHARP serves: ``dp`` stands for dp_cp, ``dp_replica`` for inter_ep_dp.

    Megatron-Core switches SHARP on by the environment variable NCCL_COLLNET_ENABLE while it makes this group, and
    deletes the variable afterwards, the user's too. Here SHARP is an option of the communicator; the environment stays.

    >>> sharp_kind("dp")
    'dp_cp'
    """
    if group not in _SHARP:
        raise Refused(
            f"sharp_enabled_group is {group!r}, but SHARP serves 'dp' or 'dp_replica'; use one of them", received=group
        )
    return _SHARP[group]


def read_config(path: Path | None, high_priority: Iterable[str]) -> dict[str, dict[str, NcclValue]]:
    """Return the options by section. A section that no Megatron group has is refused, where Megatron-Core ignores it.

    >>> read_config(None, ["dp_cp", "ep"])
    {'dp_cp': {'is_high_priority_stream': True}, 'ep': {'is_high_priority_stream': True}}
    """
    sections = {} if path is None else nccl_sections(path)
    for name in high_priority:
        sections.setdefault(name, {})[_HIGH_PRIORITY] = True
    for name, section in sections.items():
        if name not in CONFIG_KEYS:
            raise UnknownName(
                f"NCCL options are for group {name!r}, but the groups are {', '.join(sorted(CONFIG_KEYS))}; "
                "use one of them",
                name=name,
                known=sorted(CONFIG_KEYS),
            )
        _check_network(section)
    return sections


def overwrite_nccl_comm_cfgs(nccl_comm_cfgs, pg_name, key_value_pair):  # type: ignore[no-untyped-def]
    """Set one option of one group in a dictionary of NCCL options, in place.

    >>> sections = {}
    >>> overwrite_nccl_comm_cfgs(sections, "tp", ("max_ctas", 8))
    >>> sections
    {'tp': {'max_ctas': 8}}
    """
    nccl_comm_cfgs.setdefault(pg_name, {})[key_value_pair[0]] = key_value_pair[1]


def get_nccl_options(pg_name, nccl_comm_cfgs):  # type: ignore[no-untyped-def]
    """``ProcessGroupNCCL.Options`` for one section of a dictionary of NCCL options, None where it has no such section.

    An option that this torch does not know is refused; Megatron-Core reads five, and ignores all others.
    """
    if pg_name not in nccl_comm_cfgs:
        return None
    section = dict(nccl_comm_cfgs[pg_name])
    _check_network(section)
    high_priority = section.pop(_HIGH_PRIORITY, False)
    return nccl_options(Options(nccl=section, high_priority=bool(high_priority)), "nccl")


def _check_network(section: Mapping[str, object]) -> None:
    network = section.get("net_name")
    if network is not None and str(network).lower() not in ("ib", "socket"):
        raise Refused(f"net_name is {network!r:.80} in an NCCL configuration; use 'IB' or 'Socket'", received=network)


def prepare_ucc(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the environment variables that UCC needs.

    >>> variables = {"UCX_TLS": "tcp"}
    >>> prepare_ucc(variables)
    >>> variables["UCX_TLS"], variables["UCX_NET_DEVICES"]
    ('tcp', 'all')
    """
    if environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        raise Refused(
            "CUDA_DEVICE_MAX_CONNECTIONS is 1, with which UCC's transfers between stages wait for each other; set "
            "it to more than 1, or unset it"
        )
    for name, value in _UCC_UNLESS_SET.items():
        environment.setdefault(name, value)
    environment.update(_UCC_ALWAYS)
