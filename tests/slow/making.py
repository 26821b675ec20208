"""Reports on slow jobs, as the watch writes them."""

from rankmesh.debug.slow import Finding, SlowReport

LATE = Finding("computes", (13,), "dp@tp1", "dp", None, ("node1",), 0.084, 0.14, 0.61, 1, 0.0, "it is late")


def report(ranks, *findings, devices=8):
    """A job with some devices on each host, in which the ranks of the findings make the others wait."""
    named = {rank for finding in findings for rank in finding.ranks}
    caused = tuple(0.084 if rank in named else 0.0004 * (rank * 37 % 11) for rank in range(ranks))
    waits = tuple(0.002 if rank in named else 0.09 - 0.001 * (rank * 37 % 11) for rank in range(ranks))
    computes = tuple(0.48 if rank in named else 0.391 + 0.001 * (rank * 37 % 11) for rank in range(ranks))
    hosts = tuple(rank // devices for rank in range(ranks))
    names = tuple(f"node{host}" for host in range(hosts[-1] + 1))
    places = tuple(rank % 2 for rank in range(ranks))
    trend = tuple(0.52 + 0.09 * (number > 80) for number in range(120))
    return SlowReport(0.0, 60.0, 98, 0.61, 0.1, findings, names, hosts, places, caused, waits, computes, trend)
