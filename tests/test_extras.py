"""What is installed without extras is enough to plan, and what is missing is named with its extra."""

import os
import re
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution, requires

from tests.limits import LONG

# Runs with nothing but the standard library, numpy and rankmesh to be found.
BARE = """
import sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder

class Bare:
    known = {*sys.stdlib_module_names, "numpy", "rankmesh", *ALSO}
    def find_spec(self, name, path=None, target=None):
        here = name.partition(".")[0] in self.known or name.startswith("_sysconfigdata")
        return PathFinder.find_spec(name, path, target) if here else None

sys.meta_path[:] = [BuiltinImporter, FrozenImporter, Bare()]
"""

PLANNING = """
import rankmesh as rm
from rankmesh import placement as topology, viz
from rankmesh.core import communicators, difference, presets, with_nccl_config
from rankmesh.readers import source
for name in presets.PRESETS:
    rm.read(name).digest
plan = rm.recipes.megatron(world_size=64, tp=2, cp=2, pp=2, ep=4, etp=1)
assert rm.Plan.from_json(plan.to_json()).replace(rank_map=range(63, -1, -1)).groups("tp").tolist()
plan.explain(13), plan.sharing, plan.of(13), communicators.communicators(plan)
topology.crossings(plan.groups("dp"), 8)
up = rm.Sharding(rm.Mesh(tp=2), ("tp", None), shape=(4, 4))
moves = rm.Transfer({"up": up}, {"up": rm.Sharding(rm.Mesh(tp=4), ("tp", None), shape=(4, 4))})
assert moves.bytes == moves.lower_bound and moves.digest and moves.of(1).receives
difference.difference(plan, rm.read("tp=2,dp=*", world_size=64))
with_nccl_config(plan, {"tp": {"max_ctas": 8}})
read = source.read("tp=2,cp=2,dp=4/expert:ep=8,edp=*")
viz.overview(read, gpus_per_node=8), viz.picture(read.plan), viz.grid(read.plan.mesh)
"""


def bare(program, *also):
    """What a fresh interpreter says of a program, where only numpy and the packages in ``also`` can be imported."""
    code = f"ALSO = {also!r}{BARE}{program}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=LONG)


def packages_of(*projects):
    """The packages that come with these projects and all that they require."""
    known, waiting = set(), [*projects]
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name not in known:
            known.add(name)
            with suppress(PackageNotFoundError):
                waiting += [re.split(r"[^\w.-]", line)[0] for line in requires(name) or () if "extra ==" not in line]
    paths = (path for name in known for path in _files(name))
    return sorted({path.parts[0].removesuffix(".py") for path in paths if path.suffix == ".py"})


def _files(project):
    with suppress(PackageNotFoundError):
        return distribution(project).files or ()
    return ()


# Python 3.10 reads TOML, as the figures of hardware are, with a package that is installed there.
TOML = () if sys.version_info >= (3, 11) else ("tomli",)


def test_planning_needs_numpy_alone():
    """Every planning package, preset, recipe, document and picture works with numpy alone."""
    assert bare(PLANNING, *TOML).stderr == ""


def test_importing_rankmesh_loads_numpy_alone():
    """Nothing of the command's packages is loaded by `import rankmesh` or by planning, though they are installed."""
    count = "import sys; print(sorted({'typer', 'click', 'rich', 'yaml', 'torch'} & {*sys.modules}))"
    program = f"import rankmesh\n{count}\n{PLANNING}{count}\nimport yaml\n{count}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n[]\n['yaml']\n"


MISSING = [
    ("rankmesh.connect", "torch", "torch"),
    ("import_module('rankmesh.sim')", "torch", "torch"),
    ("import_module('rankmesh.testing.strategies')", "hypothesis", "testing"),
]
EACH = """
import rankmesh, rankmesh.readers
from importlib import import_module
for expression in EXPRESSIONS:
    try:
        eval(expression)
        print("nothing is missing")
    except rankmesh.MissingExtra as error:
        print(error)
"""


def test_what_is_missing_names_its_extra():
    """What needs an extra that is not installed says which one it is."""
    done = bare(f"EXPRESSIONS = {[expression for expression, _, _ in MISSING]!r}{EACH}", "yaml", *TOML)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        f"the package {package!r} is not installed; pip install 'rankmesh[{extra}]'" for _, package, extra in MISSING
    ]


def test_the_command_needs_no_extra(tmp_path):
    """A plain install shows layouts, configs and launch scripts."""
    also = packages_of("typer", "rich", "PyYAML", "tomli")
    program = "import sys, rankmesh.cli\nsys.argv = ['rankmesh', 'show', {!r}]\nrankmesh.cli.main()"
    files = {
        "a.yaml": "parallelism: {dp: 2, tp: 2, pp: 1}\n",
        "a.toml": "[parallelism]\ndata_parallel_shard_degree = 4\n",
        "ds.json": '{"zero_optimization": {"stage": 3}, "tensor_parallel": {"autotp_size": 2}, "train_batch_size": 2}',
        "run.sh": "torchrun --nproc_per_node 4 pretrain_gpt.py --tensor-model-parallel-size 2\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        done = bare(program.format(str(tmp_path / name)).replace("'show'", "'show', '--world-size', '4'"), *also)
        assert done.returncode == 0, done.stderr
    done = bare(program.format("llama3-405b"), *also)
    assert done.returncode == 0, done.stderr


def test_the_engines_are_installed_in_ci():
    """The tests of rankmesh-engines are skipped where it is not installed; where changes land, it is."""
    assert not os.environ.get("CI") or distribution("rankmesh-engines")
