"""Topology: hosts, and which groups cross them. numpy only."""

from rankmesh.topology.hosts import Crossings, crossings

__all__ = ["Crossings", "crossings"]
