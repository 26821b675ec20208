"""install() and uninstall(): Megatron's own modules use ours, whenever they were imported, and get theirs back."""

import importlib
import subprocess
import sys
import warnings

import pytest
from tests.dialects import dry
from tests.limits import LONG

pytest.importorskip("megatron.core.parallel_state")


def module(name):
    """A module of megatron-core."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(f"megatron.core.{name}")


class DDP:
    """What a collection asks of the configuration of DistributedDataParallel."""

    num_distributed_optimizer_instances = 1
    use_distributed_optimizer = False


def _installed(me):
    from rankmesh.dialects import megatron as ours

    core, layers = importlib.import_module("megatron.core"), module("tensor_parallel.layers")
    peer, grid = module("parallel_state"), module("hyper_comm_grid").HyperCommGrid
    getter, mpu = layers.get_tensor_model_parallel_rank, core.mpu
    collection = module("transformer.transformer_layer").ProcessGroupCollection
    ours.install()
    ours.install()
    from megatron.core import parallel_state as imported_from
    from megatron.core.process_groups_config import ProcessGroupCollection

    assert sys.modules["megatron.core.parallel_state"] is ours.parallel_state
    assert core.parallel_state is core.mpu is imported_from is ours.parallel_state
    assert layers.get_tensor_model_parallel_rank is ours.parallel_state.get_tensor_model_parallel_rank
    assert ProcessGroupCollection is collection
    assert module("hyper_comm_grid").HyperCommGrid is ours.hyper_comm_grid.HyperCommGrid
    module("inference.communication_utils")  # which is imported now
    dry.begin(5, 8)
    ours.parallel_state.initialize_model_parallel(tensor_model_parallel_size=4)
    assert module("utils").get_pg_rank(core.mpu.get_tensor_model_parallel_group()) == 1
    ours.parallel_state.destroy_model_parallel()
    ours.uninstall()
    ours.uninstall()
    assert layers.get_tensor_model_parallel_rank is getter is peer.get_tensor_model_parallel_rank
    assert core.mpu is core.parallel_state is mpu is module("parallel_state") is peer
    assert module("hyper_comm_grid").HyperCommGrid is grid
    peer.initialize_model_parallel(create_gloo_process_groups=False)
    me.error(RuntimeError, ours.install)
    assert module("parallel_state") is peer
    peer.destroy_model_parallel()
    actor = ours.ParallelState("actor")
    ours.install(actor)
    assert core.parallel_state is actor
    actor.initialize_model_parallel(tensor_model_parallel_size=4)
    group = actor.get_tensor_model_parallel_group()
    collection = module("process_groups_config").ProcessGroupCollection
    assert collection.use_mpu_process_groups(["tp"]).tp is group
    assert collection.setup_process_groups_for_ddp(None, None, DDP)["tp_group"] is group
    actor.destroy_model_parallel()
    ours.uninstall()
    assert ours.releases.followed_state() is ours.parallel_state


def test_megatron_that_is_imported(ranks):
    """Modules, attributes, and functions imported by name become ours; collections stay Megatron's and ask ours."""
    ranks(1, _installed, world=None)


@pytest.mark.long
def test_megatron_that_is_not_imported_yet():
    """Ours in every way of importing after install(); nothing of ours is left in Megatron after uninstall()."""
    program = """
import warnings
warnings.simplefilter("ignore")
from rankmesh.dialects.megatron import install, parallel_state as ours
install()
import megatron.core.parallel_state as a
from megatron.core import mpu as b, parallel_state as c
from megatron.core.parallel_state import get_data_parallel_rank as d
from megatron.core.tensor_parallel import layers
import megatron.core
assert a is b is c is megatron.core.parallel_state is ours
assert d is ours.get_data_parallel_rank
assert layers.get_tensor_model_parallel_rank is ours.get_tensor_model_parallel_rank
print("all ours")

import sys
import megatron.core.models.gpt
from rankmesh.dialects.megatron import uninstall
uninstall()
of = lambda value: getattr(value, "__module__", None) or getattr(value, "__name__", "")
modules = [module for name, module in sys.modules.items() if name.startswith("megatron")]
print([name for module in modules for name, value in vars(module).items() if "rankmesh" in str(of(value))])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LONG, check=False)
    assert done.stdout == "all ours\n[]\n", done.stderr


@pytest.mark.nightly
def test_a_release_that_is_not_compared_with():
    """install() under it warns: which releases are tested, and which of its names the drop-ins have not."""
    program = """
import warnings
warnings.simplefilter("ignore")
from megatron.core import package_info, parallel_state
package_info.__version__ = "0.99.1"
def unheard_of(): pass
unheard_of.__module__ = parallel_state.__name__
parallel_state.unheard_of = unheard_of
from rankmesh.dialects.megatron import install
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    install()
print(*[word.message for word in told if "drop-ins" in str(word.message)])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LONG, check=False)
    assert done.stdout.startswith(
        "megatron-core 0.99.1 is not among the releases that the drop-ins are tested with, 0.16 to 0.20"
    )
    assert "unheard_of" in done.stdout.rpartition("and lack:")[2]


def test_without_megatron(monkeypatch):
    """Where megatron-core is not installed, install() says what to do."""
    from rankmesh.dialects import megatron as ours

    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", None)
    with pytest.raises(RuntimeError, match="pip install megatron-core"):
        ours.install()
