import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmesh.core.host_names import host_list, natural
from rankmesh.errors import ClusterError

NUMBERS = st.integers(0, 130)
RANGES = st.one_of(
    NUMBERS.map(str),
    st.tuples(NUMBERS, st.integers(0, 12)).map(lambda ab: f"{ab[0]}-{sum(ab)}"),
    st.tuples(st.integers(0, 9), st.integers(0, 12)).map(lambda ab: f"{ab[0]:03d}-{sum(ab):03d}"),
)
WORDS = st.tuples(st.sampled_from(["node", "gpu-a", "n1x"]), st.lists(RANGES, min_size=1, max_size=3)).map(
    lambda token: f"{token[0]}[{','.join(token[1])}]"
)
LISTS = st.lists(st.one_of(WORDS, st.sampled_from(["login", "tux7"])), min_size=1, max_size=3).map(",".join)


@pytest.fixture(scope="module")
def scontrol(tmp_path_factory):
    """Slurm's own expansion; it wants a configuration, though it asks nobody."""
    if shutil.which("scontrol") is None:
        pytest.skip("scontrol is missing (slurm-client)")
    conf = tmp_path_factory.mktemp("slurm") / "slurm.conf"
    conf.write_text("ClusterName=c\nSlurmctldHost=localhost\nNodeName=localhost\nPartitionName=p Nodes=localhost\n")

    def expand(text):
        command = ["scontrol", "show", "hostnames", text]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
            env={"SLURM_CONF": str(conf), "PATH": "/usr/bin:/bin"},
        )
        return done.stdout.split()

    return expand


def test_lists_are_those_of_scontrol(scontrol):
    """Forty random lists, and lists with two brackets, are expanded as `scontrol show hostnames` expands them."""
    lists = ["node[1-4,7]", "a[1-2]b[3-4]", "n[08-11]", "n[008-11],x", "r[1-2]c[0-1]n[9-10]", "tux0"]

    @given(LISTS)
    def collect(text):
        lists.append(text)

    collect()
    for text in lists[:46]:
        assert list(host_list(text)) == scontrol(text), text


@pytest.mark.parametrize(
    "text", ["node[1-4", "node]1[", "node[4-1]", "node[a-b]", "n[[1]]", "n[1-9999999999]", "n[]", "node[1-٤]", 7]
)
def test_lists_that_are_none(text):
    """Brackets that do not close, ranges backwards or endless, digits that are none: refused with the list."""
    with pytest.raises(ClusterError, match="host list "):
        host_list([text])


def test_natural_order():
    """Numbers by value whatever their length, dots and dashes and case in their place, IPv4 and IPv6 as numbers."""
    for names in (
        ["node2", "node10", "node66"],
        ["node7", "node66", "node1" + "0" * 5000],
        ["n1-gpu9", "n1-gpu10", "n2-gpu1"],
        ["node2.rack10.example.org", "node10.rack2.example.org"],
        ["10.0.0.9", "10.0.0.10", "10.0.1.1"],
        ["fe80::9", "fe80::a", "fe80::10", "fe80:0:0:0:1::"],
        ["node1", "Node2", "node3"],
        ["node02", "node2", "node03"],
        ["n", "n1", "na"],
    ):
        for shuffled in (names[::-1], sorted(names)):
            assert sorted(shuffled, key=natural) == names


def test_only_ascii_digits_are_numbers():
    """A superscript or an Arabic digit is a letter: no error, and a total order."""
    names = ["node²", "node2", "node٣", "node10"]
    assert sorted(names, key=natural)[:2] == ["node2", "node10"]


@given(st.lists(st.text(alphabet="a0129.-:²B", max_size=8)))
def test_the_order_is_total(names):
    """Whatever the names, one order comes out of every order of them."""
    backwards = names[::-1]
    assert sorted(names, key=natural) == sorted(backwards, key=natural)
