"""A Megatron-style file of NCCL options, one section for each kind of group.

```yaml
tp:
  max_ctas: 8
dp_cp:
  min_ctas: 4
  net_name: IB
  is_high_priority_stream: true
```

The sections are names of groups of the plan, so a file written for Megatron-Core applies as it is; ``hcp`` stands for
every level of the hierarchical context-parallel groups. Source: ``nccl_communicator_config_path`` of Megatron-Core.

>>> from rankmesh.core import Mesh
>>> plan = Plan(Mesh(tp=2, dp=2), [GroupSpec("tp"), GroupSpec("dp")])
>>> with_nccl_config(plan, "tp: {max_ctas: 8}").spec("tp").options
Options(nccl={'max_ctas': 8})
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rankmesh.core.documents import parse_yaml, read_text, refused_as
from rankmesh.core.options import NcclValue, Options, flag
from rankmesh.core.plan import Plan
from rankmesh.core.spec import GroupSpec
from rankmesh.errors import PlanError, UnknownGroup, quoted

__all__ = ["nccl_sections", "with_nccl_config"]

_HIGH_PRIORITY = "is_high_priority_stream"


def with_nccl_config(plan: Plan, config: str | Path | Mapping[str, Mapping[str, NcclValue]]) -> Plan:
    """Return the plan with these NCCL options over its own.

    ``config`` is the YAML text, the path of a file (as a ``Path``), or the mapping itself. Raises ``UnknownGroup`` for
    a section that names no group of the plan, ``PlanError`` for a file that cannot be read.
    """
    sections = nccl_sections(config)
    for name in sections:
        if not any(_applies(name, spec) for spec in plan.specs):
            raise UnknownGroup(name, plan.kinds)
    for spec in plan.specs:
        section = next((name for name in sections if _applies(name, spec)), None)
        if section is not None:
            plan = plan.with_options(_asked(spec, sections[section]), spec.name)
    return plan


def _applies(section: str, spec: GroupSpec) -> bool:
    return spec.name == section or (section == "hcp" and spec.name.startswith("hcp_"))


def _asked(spec: GroupSpec, settings: Mapping[str, NcclValue]) -> Options:
    given = {key: value for key, value in settings.items() if key != _HIGH_PRIORITY}
    high = settings.get(_HIGH_PRIORITY)
    return Options(
        nccl={**dict(spec.options.nccl or ()), **given} or None,
        high_priority=None if high is None else flag("high_priority", high),
    )


def nccl_sections(config: str | Path | Mapping[str, Mapping[str, NcclValue]]) -> dict[str, dict[str, NcclValue]]:
    """Return the options by section. Raises ``PlanError`` for what is not such a file."""
    if isinstance(config, Mapping):
        data: object = config
    else:
        with refused_as(PlanError, "this NCCL configuration", "write one section for each group: tp: {max_ctas: 8}"):
            data = parse_yaml(read_text(config) if isinstance(config, Path) else config) or {}
    if not isinstance(data, Mapping) or not all(isinstance(section, Mapping) for section in data.values()):
        raise PlanError(
            f"{quoted(data)} is not an NCCL configuration; map names of groups to options, such as "
            "tp: {max_ctas: 8}, or give a path as a pathlib.Path",
            received=data,
        )
    return {str(name): dict(section) for name, section in data.items()}
