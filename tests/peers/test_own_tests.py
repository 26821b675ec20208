"""Others' own tests against the drop-ins, from a checkout of their sources.

``make test-peers EZPZ=/path MEGATRON=/path:/another JOBS=0 ARGS='-k own_tests -s'``: the package index has releases
without their tests.
"""

import importlib
import json
import os
import random
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest
from tests.dialects import dry
from tests.peers.conftest import checkout
from tests.peers.fetch import folder

from rankmesh.dialects import ezpz as drop_in

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
RANKS, LIMIT = 8, 1500

# Megatron's tests of what the drop-ins stand for; a release has those that it has.
FILES = (
    "test_parallel_state.py",
    "test_process_groups_config.py",
    "test_hyper_comm_grid.py",
    "test_mimo_hetero_topology.py",
    "pipeline_parallel/test_bridge_communicator.py",
)


def test_ezpz(tmp_path):
    """All 17 tests in ezpz's test_tp.py, with the drop-in where they import ezpz.tp."""
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.peers.as_ezpz", "--noconftest", "-c", os.devnull,
         "--rootdir", str(tmp_path), str(checkout("EZPZ") / "tests" / "test_tp.py")],
        capture_output=True, text=True, timeout=200, check=False, cwd=REPOSITORY,
    )  # fmt: skip
    assert "17 passed" in result.stdout, result.stdout[-4000:]


def _ezpz(me, source):
    ezpz = ModuleType("ezpz")
    ezpz.__path__ = [f"{source}/src/ezpz"]  # its package without what it imports
    sys.modules["ezpz"] = ezpz
    local, draw, wrong = importlib.import_module("ezpz.tp"), random.Random(11), []  # noqa: S311
    for _ in range(40):
        tp, pp, cp, dp = (draw.choice((1, 2, 3, 4)) for _ in range(4))
        world, result = tp * pp * cp * dp, []
        rank = draw.randrange(world)
        for module in (local, drop_in):
            with dry.world(rank, world):
                module.initialize_tensor_parallel(tp, pp, cp)
                query = {name: getattr(module, name) for name in dir(local) if name.startswith("get_")}
                output = {name: getter() for name, getter in query.items()}
                result.append({name: dry.members(one) if "group" in name else one for name, one in output.items()})
                module.destroy_tensor_parallel()
        wrong += [(tp, pp, cp, dp, rank, result)] if result[0] != result[1] or len(result[0]) < 16 else []
    return wrong[:5]


def test_ezpz_groups(ranks):
    """40 configurations of ezpz's own functions: every getter gives what the drop-in's gives."""
    assert ranks(1, _ezpz, str(checkout("EZPZ")), world=None) == [[]]


def both_sides(peer, place):
    """How each test of each file ended on each of eight gloo ranks, over Megatron's own modules and the drop-ins."""
    for path in (peer / "tests" / "unit_tests" / path for path in FILES):
        if path.exists():
            text = path.read_text(encoding="utf-8").replace("'nccl'", "'gloo'").replace('"nccl"', '"gloo"')
            (place / path.stem).mkdir()
            (place / path.stem / path.name).write_text(text, encoding="utf-8")
    world = {"MASTER_ADDR": "127.0.0.1", "PYTHONPATH": f"{peer}:{HERE}:{folder('pytest-mock')}",
             "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}  # fmt: skip
    command = [sys.executable, str(HERE / "as_megatron.py"), str(place)]
    ranks = subprocess.Popen(command, cwd=place, env={**os.environ, **world}, start_new_session=True)
    try:
        assert ranks.wait(LIMIT) == 0
    finally:
        with suppress(ProcessLookupError):
            os.killpg(ranks.pid, signal.SIGKILL)
    return {one.name: [ended(one / side) for side in ("its-own", "drop-ins")] for one in sorted(place.iterdir())}


def ended(side):
    """What each rank wrote, up to the test in which it was killed for hanging."""
    files = [side / f"{rank}.json" for rank in range(RANKS)]
    return [json.loads(file.read_text(encoding="utf-8")) if file.exists() else {} for file in files]


def passed(side):
    """The tests that passed on every rank."""
    return {name for name in side[0] if all(seen.get(name) == "passed" for seen in side)}


@pytest.mark.timeout(LIMIT + 60)
@pytest.mark.parametrize("peer", os.environ.get("MEGATRON", "").split(os.pathsep), ids=lambda peer: Path(peer).name)
def test_megatron(tmp_path, peer):
    """8 ranks, every file twice: whatever passes over Megatron's own modules passes over the drop-ins."""
    if not peer:
        pytest.skip("MEGATRON names no checkout")
    result, worse = both_sides(Path(peer).resolve(), tmp_path), {}
    for file, (local, ours) in result.items():
        names = {name: None for seen in local for name in seen}
        hung = sorted({rank for side in (local, ours) for rank in range(RANKS) if side[rank].keys() != names.keys()})
        print(f"{Path(peer).name} {file}: of {len(names)} tests {len(passed(local))} passed over its own, "  # noqa: T201
              f"{len(passed(ours))} over the drop-ins", *hung and [f"; hung in some: ranks {hung}"])  # fmt: skip
        for name in sorted(names.keys() - passed(local)):
            print(f"  {name}: {local[0].get(name, 'hung')}; drop-ins: {ours[0].get(name, 'hung')}")  # noqa: T201
        # What hung over its own on some rank says nothing of the others.
        worse |= {
            f"rank {rank}: {name}": ours[rank].get(name, "hung")
            for name in names
            if all(name in seen for seen in local)
            for rank in range(RANKS)
            if local[rank][name] == "passed" != ours[rank].get(name)
        }
        assert passed(local) or hung, f"nothing passed of {file}"
    assert not worse, worse
