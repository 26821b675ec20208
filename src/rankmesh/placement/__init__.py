"""Placement: the cluster, what a step sends, what it costs, and the rank order that costs least. No torch."""

from rankmesh.core.lazy import PROVIDED
from rankmesh.placement.cluster import Cluster, Host, Level
from rankmesh.placement.crossings import Crossings, crossings, hops, reach, widest
from rankmesh.placement.model import Training, Transformer
from rankmesh.placement.place import KindCost, Placed, place
from rankmesh.placement.steps import stage_traffic, step_traffic
from rankmesh.placement.traffic import Message, Traffic

__all__ = [
    "Cluster",
    "Crossings",
    "Host",
    "KindCost",
    "Level",
    "Message",
    "Placed",
    "Traffic",
    "Training",
    "Transformer",
    "crossings",
    "hops",
    "place",
    "reach",
    "stage_traffic",
    "step_traffic",
    "widest",
]

# A cluster is read from files by what knows their formats.
PROVIDED["cluster files"] = "rankmesh.placement.read"
