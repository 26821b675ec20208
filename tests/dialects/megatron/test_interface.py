"""The interface: every function, class and global of megatron-core 0.16.1, with its signature."""

import dataclasses
import inspect
import warnings

import pytest

from rankmesh.dialects.megatron import hyper_comm_grid, parallel_state, process_groups_config

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    peer_state = pytest.importorskip("megatron.core.parallel_state")
    pytest.importorskip("einops")
    import megatron.core.hyper_comm_grid as peer_grid
    import megatron.core.process_groups_config as peer_collection

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


def test_every_global_is_there():
    """The module globals of the peer are attributes, with the values that they have before initialisation."""
    globals_ = {
        name: value
        for name, value in vars(peer_state).items()
        if name.startswith("_") and not name.startswith("__") and not callable(value)
    }
    assert len(globals_) >= 50
    assert {name: getattr(parallel_state, name) for name in globals_} == globals_


def test_functions_are_functions_of_the_module():
    """They say where they are from, can be documented and listed."""
    functions = {name: value for name, value in vars(parallel_state).items() if inspect.isfunction(value)}
    for name in public_names(peer_state).keys() - {"RankGenerator"}:
        assert functions[name].__name__ == name
        assert functions[name].__doc__
    assert parallel_state.get_tensor_model_parallel_rank.__module__ == "rankmesh.dialects.megatron.parallel_state"


def test_collection_has_the_peers_fields_first():
    """The fields of 0.16.1 with their types, and those of later releases."""
    theirs = {field.name: field.type for field in dataclasses.fields(peer_collection.ProcessGroupCollection)}
    ours = {field.name: field.type for field in dataclasses.fields(process_groups_config.ProcessGroupCollection)}
    assert {name: ours[name] for name in theirs} == theirs
    assert ours.keys() - theirs.keys() == {
        "dp_cp_ag", "expt_dp_ag", "gtp_remat", "expt_gtp_remat", "dp_cp_gtp_remat",
        "expt_dp_gtp_remat", "tp_ep_pp_with_egtp_remat",
    }  # fmt: skip
    assert public_names(peer_collection).keys() <= public_names(process_groups_config).keys()


def test_grid_has_the_peers_methods():
    """The peer's methods take the peer's arguments; later ones are there."""
    for name, method in vars(peer_grid.HyperCommGrid).items():
        if inspect.isfunction(method):
            theirs = inspect.signature(method).parameters
            ours = inspect.signature(getattr(hyper_comm_grid.HyperCommGrid, name)).parameters
            assert {key: value.default for key, value in ours.items() if key in theirs} == {
                key: value.default for key, value in theirs.items()
            }
    for name in ("register_view", "destroy", "get_rank_enum", "_order_dims_for", "_gen_rank_enum_for"):
        assert inspect.isfunction(getattr(hyper_comm_grid.HyperCommGrid, name))
