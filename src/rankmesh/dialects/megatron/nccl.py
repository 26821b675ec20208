"""NCCL options in Megatron's words: its YAML, its dictionaries, high-priority groups, SHARP.

```yaml
dp_cp:
  max_ctas: 16
  cga_cluster_size: 4
  is_high_priority_stream: true
```
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from rankmesh.backend import torch_private
from rankmesh.core.options import Options
from rankmesh.dialects.megatron.refusals import Refused, UnknownName
from rankmesh.dialects.megatron.table import CONFIG_KEYS

__all__ = ["get_nccl_options", "overwrite_nccl_comm_cfgs", "read_config", "sharp_kind"]

_HIGH_PRIORITY = "is_high_priority_stream"
_SHARP = {"dp": "dp_cp", "dp_replica": "inter_ep_dp"}


def sharp_kind(group: str) -> str:
    """The group of the plan that SHARP serves: ``dp`` stands for dp_cp, ``dp_replica`` for inter_ep_dp.

    Megatron-Core switches SHARP on by the environment variable NCCL_COLLNET_ENABLE while it makes this group, and
    deletes the variable afterwards, the user's too. Here the one communicator is told so, and the environment stays.

    >>> sharp_kind("dp")
    'dp_cp'
    """
    if group not in _SHARP:
        raise Refused(f"received sharp_enabled_group {group!r}; it is 'dp' or 'dp_replica'; use one", received=group)
    return _SHARP[group]


def read_config(path: Path | None, high_priority: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The options by section. A section that no Megatron group has is refused, where Megatron-Core ignores it.

    >>> read_config(None, ["dp_cp", "ep"])
    {'dp_cp': {'is_high_priority_stream': True}, 'ep': {'is_high_priority_stream': True}}
    """
    sections = {} if path is None else _load(path)
    for name in high_priority:
        sections.setdefault(name, {})[_HIGH_PRIORITY] = True
    for name, section in sections.items():
        if name not in CONFIG_KEYS:
            raise UnknownName(
                f"received NCCL options for group {name!r}; the groups are {', '.join(sorted(CONFIG_KEYS))}; "
                "use one of them",
                name=name,
                known=sorted(CONFIG_KEYS),
            )
        _check_network(section)
    return sections


def _load(path: Path) -> dict[str, dict[str, Any]]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise Refused(f"received NCCL configuration {str(path)!r} that is no YAML ({error}); correct it") from error
    if not isinstance(data, dict) or not all(isinstance(section, dict) for section in data.values()):
        raise Refused(
            f"received NCCL configuration {str(path)!r} holding {data!r}; it maps groups to options, such as "
            "tp: {max_ctas: 8}; write one section for each group",
            received=data,
        )
    return data


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
    return torch_private.nccl_options(Options(nccl=section, high_priority=bool(high_priority)), "nccl")


def _check_network(section: Mapping[str, Any]) -> None:
    network = section.get("net_name")
    if network is not None and str(network).lower() not in ("ib", "socket"):
        raise Refused(
            f"received net_name {network!r} in an NCCL configuration; it is 'IB' or 'Socket'; use one", received=network
        )
