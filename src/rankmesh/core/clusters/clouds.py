"""Clouds: the labels of Kubernetes nodes, AWS's network nodes, and a plain ``{host: switch}``.

```
kubectl get nodes -o json                          levels host nvlink leaf spine core zone, as far as nodes have them
aws ec2 describe-instance-topology                 levels host nvlink leaf spine core: NetworkNodes, innermost last
{"node1": "s1", "node2": ["s2", "top"]}            levels host leaf spine: switches, innermost first
```

Source: the labels of NVIDIA's topograph and GPU operator, of GKE and EKS, and Kubernetes' well-known labels; AWS's
InstanceTopology, whose CapacityBlockId names the domain of an UltraServer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rankmesh.core.clusters.machine import Machine, Site, outward
from rankmesh.errors import ClusterError

__all__ = ["is_nodes", "read_aws", "read_nodes", "read_switches"]

# Of each level the labels that name its unit; the first one that a node has counts.
_LABELS: Mapping[str, tuple[str, ...]] = {
    "nvlink": ("network.topology.nvidia.com/accelerator", "accelerator.topograph.run/domain", "nvidia.com/gpu.clique"),
    "leaf": ("network.topology.nvidia.com/leaf", "network.topology.nvidia.com/block", "fabric.topograph.run/tier-0",
             "topology.k8s.aws/network-node-layer-3", "cloud.google.com/gce-topology-subblock"),
    "spine": ("network.topology.nvidia.com/spine", "fabric.topograph.run/tier-1",
              "topology.k8s.aws/network-node-layer-2", "cloud.google.com/gce-topology-block"),
    "core": ("network.topology.nvidia.com/core", "network.topology.nvidia.com/datacenter",
             "fabric.topograph.run/tier-2", "topology.k8s.aws/network-node-layer-1"),
    "zone": ("topology.kubernetes.io/zone",),
}  # fmt: skip
_DEVICES = ("nvidia.com/gpu", "amd.com/gpu", "intel.com/gpu", "habana.ai/gaudi", "google.com/tpu")
# Devices of an instance; of other types the caller gives the number.
_INSTANCES: Mapping[str, int] = {
    "p4d.24xlarge": 8, "p4de.24xlarge": 8, "p5.48xlarge": 8, "p5e.48xlarge": 8, "p5en.48xlarge": 8,
    "p6-b200.48xlarge": 8, "p6e-gb200.36xlarge": 4,
}  # fmt: skip


def is_nodes(data: Mapping[str, object]) -> bool:
    """Return whether a document is what ``kubectl get nodes -o json`` prints, of one node or of several."""
    items = data.get("items")
    return data.get("kind") == "Node" or (isinstance(items, list) and data.get("kind") in ("List", "NodeList"))


def read_nodes(data: Mapping[str, Any]) -> Machine:
    """Return the machine of Kubernetes nodes; nodes without devices are left out where others have some."""
    nodes = [node for node in data.get("items", [data]) if node.get("kind", "Node") == "Node"]
    devices = {_name(node): _count(node) for node in nodes}
    known = [node for node in nodes if devices[_name(node)] or not any(devices.values())]
    labels = {_name(node): node.get("metadata", {}).get("labels") or {} for node in known}
    if not labels:
        raise ClusterError("the list has no nodes; give what kubectl get nodes -o json prints")
    levels = tuple(level for level in _LABELS if any(_unit(of_node, level) for of_node in labels.values()))
    sites = {
        name: Site(tuple(_unit(of_node, level) or name for level in levels), devices[name] or None)
        for name, of_node in labels.items()
    }
    return Machine(levels, sites)


def _name(node: Mapping[str, Any]) -> str:
    return str(node.get("metadata", {}).get("name", ""))


def _unit(labels: Mapping[str, str], level: str) -> str | None:
    return next((labels[label] for label in _LABELS[level] if labels.get(label)), None)


def _count(node: Mapping[str, Any]) -> int:
    status = node.get("status", {})
    resources = status.get("allocatable") or status.get("capacity") or {}
    return sum(int(resources[name]) for name in _DEVICES if str(resources.get(name, "")).isdecimal())


def read_aws(data: Mapping[str, Any]) -> Machine:
    """Return the machine of ``describe-instance-topology``; hosts are instance ids."""
    if data.get("NextToken"):
        raise ClusterError(
            f"the listing has {len(data['Instances'])} instances and a NextToken: more follow; list them all, without "
            "--max-items and --no-paginate"
        )
    rows = {str(row["InstanceId"]): row for row in data["Instances"]}
    chains = {name: tuple(reversed(row.get("NetworkNodes") or ())) for name, row in rows.items()}
    levels = outward(chains)
    domains = any(row.get("CapacityBlockId") for row in rows.values())
    sites = {
        name: Site(
            ((str(row.get("CapacityBlockId") or name),) if domains else ()) + chains[name],
            _INSTANCES.get(str(row.get("InstanceType"))),
        )
        for name, row in rows.items()
    }
    return Machine((("nvlink",) if domains else ()) + levels, sites)


def read_switches(data: Mapping[str, str | Iterable[object]]) -> Machine:
    """Return the machine of ``{host: switch}``, or of ``{host: [switch, the one above, ...]}``."""
    chains = {name: (value,) if isinstance(value, str) else tuple(map(str, value)) for name, value in data.items()}
    return Machine(outward(chains), {name: Site(chain) for name, chain in chains.items()})
