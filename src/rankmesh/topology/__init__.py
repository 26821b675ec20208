"""Topology: the cluster as nested levels, its readers, and which groups cross what. No torch."""

from rankmesh.topology.cluster import Cluster, Host, Level
from rankmesh.topology.crossings import Crossings, crossings, hops, reach, widest
from rankmesh.topology.names import host_list, natural

__all__ = ["Cluster", "Crossings", "Host", "Level", "crossings", "hops", "host_list", "natural", "reach", "widest"]
