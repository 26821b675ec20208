"""The interface of megatron-core 0.16.1; ``tests/peers`` has globals, grids and fields of each release."""

import dataclasses
import inspect
import warnings

import pytest

from rankmesh.dialects.megatron import parallel_state
from rankmesh.dialects.megatron.process_groups_config import ProcessGroupCollection

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    peer_state = pytest.importorskip("megatron.core.parallel_state")
    from megatron.core.process_groups_config import ProcessGroupCollection as PeerCollection

LATER = {
    "get_data_parallel_group": ["with_gtp_remat"],
    "get_data_parallel_rank": ["with_gtp_remat"],
    "get_data_parallel_world_size": ["with_gtp_remat"],
    "get_expert_data_parallel_group": ["with_gtp_remat"],
    "get_expert_data_parallel_rank": ["with_gtp_remat"],
    "get_expert_data_parallel_world_size": ["with_gtp_remat"],
    "get_expert_tensor_model_pipeline_parallel_group": ["with_egtp_remat"],
    "initialize_model_parallel": ["rank_offset", "local_world_size", "gtp_remat_size", "expert_gtp_remat_size"],
}


def public_names(module):
    """What a module defines itself."""
    return {name: value for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}


@pytest.mark.parametrize("name", sorted(public_names(peer_state)))
def test_every_function_has_the_peers_signature(name):
    """Parameters, defaults and annotations are the peer's; later releases' parameters follow them."""
    theirs, ours = vars(peer_state)[name], getattr(parallel_state, name)
    if inspect.isclass(theirs):
        theirs, ours = theirs.__init__, ours.__init__
    expected, found = inspect.signature(theirs), inspect.signature(ours)
    parameters = list(found.parameters.values())
    count = len(expected.parameters)
    assert parameters[:count] == list(expected.parameters.values())
    later = ["gtp_remat"] if name == "RankGenerator" else LATER.get(name, [])
    assert [parameter.name for parameter in parameters[count:]] == later
    assert all(parameter.default is not inspect.Parameter.empty for parameter in parameters[count:])


def test_functions_are_functions_of_the_module():
    """They say where they are from, can be documented and listed."""
    functions = {name: value for name, value in vars(parallel_state).items() if inspect.isfunction(value)}
    for name in public_names(peer_state).keys() - {"RankGenerator"}:
        assert functions[name].__name__ == name
        assert functions[name].__doc__
    assert parallel_state.get_tensor_model_parallel_rank.__module__ == "rankmesh.dialects.megatron.parallel_state"


def test_fields_of_a_collection_have_the_peers_types():
    """Those of 0.16.1; the order is compared with each release."""
    theirs = {field.name: field.type for field in dataclasses.fields(PeerCollection)}
    ours = {field.name: field.type for field in dataclasses.fields(ProcessGroupCollection)}
    assert {name: ours[name] for name in theirs} == theirs
