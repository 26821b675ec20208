"""Placement: what a step sends, what it costs on a cluster, and the rank order that costs least. No torch."""

from rankmesh.core.model import Training, Transformer
from rankmesh.placement.crossings import Crossings, crossings, hops, widest
from rankmesh.placement.place import KindCost, Placed, place
from rankmesh.placement.steps import step_traffic
from rankmesh.placement.traffic import Message, Traffic

__all__ = [
    "Crossings",
    "KindCost",
    "Message",
    "Placed",
    "Traffic",
    "Training",
    "Transformer",
    "crossings",
    "hops",
    "place",
    "step_traffic",
    "widest",
]
