"""Random clusters: uneven hosts, uneven units, hosts listed in any order, boards inside some."""

from hypothesis import strategies as st

from rankmesh.core.clusters.cluster import Cluster, Host, Level

_NAMES = ("host", "nvlink", "leaf", "spine")


@st.composite
def clusters(draw, most_hosts=6, most_devices=4):
    """A cluster of a few hosts in up to three levels around them."""
    count = draw(st.integers(1, most_hosts))
    depth = draw(st.integers(1, 4))
    units = list(range(count))
    places = [()] * count
    for level in _NAMES[1:depth]:
        above = draw(st.lists(st.integers(0, 2), min_size=len(set(units)), max_size=len(set(units))))
        parent = dict(zip(sorted(set(units)), above, strict=True))
        units = [parent[unit] for unit in units]
        places = [(*place, f"{level}{unit}") for place, unit in zip(places, units, strict=True)]
    names = draw(st.permutations([f"node{number}" for number in range(8, 8 + count)]))
    devices = draw(st.lists(st.integers(1, most_devices), min_size=count, max_size=count))
    inside = [()] * count
    if draw(st.booleans()):
        inside = [(tuple(draw(st.lists(st.integers(0, 1), min_size=many, max_size=many))),) for many in devices]
    levels = Level.all_unmeasured((*["board"][: len(inside[0])], *_NAMES[:depth]))
    return Cluster(levels, tuple(map(Host, names, devices, places, inside)))
