"""Data parallel: the groups that flags choose, dense and expert, with their ranks and sizes.

```
get_data_parallel_group()                              dp
  with_context_parallel                                dp_cp
  with_context_parallel, partial_data_parallel         intra_dp_cp     one optimizer instance
  with_context_parallel, independent_all_gather        dp_cp_ag
  with_gtp_remat (the default), where weights are sharded by gtp_remat     dp_gtp, dp_cp_gtp: all ranks with other data
```
"""

# No postponed annotations here: the signatures are those of Megatron-Core, annotations and all.

import warnings
from collections.abc import Iterator
from typing import Any

from rankmesh.dialects.megatron.groups_of import named
from rankmesh.dialects.megatron.refusals import NotInitialized, UnknownName
from rankmesh.dialects.megatron.state import Function, State, absent, in_a_world
from rankmesh.dialects.megatron.table import BY_KIND, override

__all__ = ["functions"]


def functions(state: State) -> Iterator[Function]:
    """Every function that chooses a data-parallel group by flags."""
    yield from _dense(state)
    yield _dense_number(state, "rank")
    yield _dense_number(state, "size")
    yield from _expert(state)
    yield from _joined(state)


def _with_remat(state: State, kind: str, wanted: bool) -> str:
    """The group with the ranks along gtp_remat, where there are any."""
    whole = f"{kind}_gtp"
    return whole if wanted and whole in BY_KIND and state.globals[BY_KIND[whole].group] is not None else kind


def _chosen(state: State, with_cp: bool, partial: bool, gather: bool = False, remat: bool = False) -> str:
    if partial and not with_cp:
        state.group("dp")
        raise NotInitialized(
            "received partial_data_parallel without with_context_parallel; an optimizer instance spans context "
            "parallelism; set both"
        )
    if partial:
        return "intra_dp_cp"
    if gather and with_cp:
        return "dp_cp_ag"
    return _with_remat(state, "dp_cp" if with_cp else "dp", remat)


def _dense_group(state: State) -> Function:
    plain: Any = None
    whole: Any = None

    def get_data_parallel_group(  # type: ignore[no-untyped-def]
        with_context_parallel=False, partial_data_parallel=False, independent_all_gather=False, with_gtp_remat=True
    ):
        """The data-parallel group that the flags choose."""
        group = whole if with_context_parallel else plain
        if group is not None and with_gtp_remat and not partial_data_parallel and not independent_all_gather:
            return group
        return state.group(
            _chosen(state, with_context_parallel, partial_data_parallel, independent_all_gather, with_gtp_remat)
        )

    def refresh() -> None:
        nonlocal plain, whole
        plain = state.group(_with_remat(state, "dp", True), check_initialized=False)
        whole = state.group(_with_remat(state, "dp_cp", True), check_initialized=False)

    state.refreshers.append(refresh)
    return get_data_parallel_group


def _dense(state: State) -> Iterator[Function]:
    yield _dense_group(state)

    def get_data_parallel_group_gloo(with_context_parallel=False, partial_data_parallel=False):  # type: ignore[no-untyped-def]
        """The CPU twin of the data-parallel group that the flags choose."""
        return state.group(_chosen(state, with_context_parallel, partial_data_parallel) + "_gloo")

    yield get_data_parallel_group_gloo

    def has_separate_all_gather_group() -> bool:
        """Whether gathers have a communicator of their own."""
        return state.globals["_DATA_PARALLEL_GROUP_WITH_CP_AG"] is not None

    yield has_separate_all_gather_group

    def get_data_parallel_src_rank(with_context_parallel=False):  # type: ignore[no-untyped-def]
        """The first global rank of the data-parallel group."""
        return _ranks(state, with_context_parallel)[0]

    yield get_data_parallel_src_rank

    def get_data_parallel_global_ranks(with_context_parallel=False):  # type: ignore[no-untyped-def]
        """The global ranks of the data-parallel group."""
        return _ranks(state, with_context_parallel)

    yield get_data_parallel_global_ranks

    def get_hybrid_data_context_parallel_groups(check_initialized=True, group_size=None):  # type: ignore[no-untyped-def]
        """The hybrid group of this size inside dp_cp; the size of dp_cp gives dp_cp itself."""
        if state.globals["get_data_parallel_world_size"](with_context_parallel=True) == group_size:
            return state.group("dp_cp", check_initialized)
        groups = state.globals["_HYBRID_DP_CP_GROUPS"]
        if group_size not in groups:
            raise UnknownName(
                f"received group_size {group_size!r}; the hybrid groups of this rank have {sorted(groups)} ranks; use "
                "one of them, and hybrid_context_parallel=True at initialisation",
                received=group_size,
                known=sorted(groups),
            )
        return groups[group_size]

    yield get_hybrid_data_context_parallel_groups


def _ranks(state: State, with_cp: bool) -> Any:
    row = BY_KIND["dp_cp" if with_cp else "dp"]
    ranks = state.globals[str(row.ranks)]
    if ranks is None:
        raise absent(state, row)
    return ranks


def _dense_number(state: State, word: str) -> Function:
    forced, method = override("data_parallel", word), word
    plain: Any = None
    whole: Any = None

    def number(with_cp: bool, partial: bool = False, remat: bool = True) -> Any:
        if (value := state.globals[forced]) is not None:
            return value
        if not in_a_world():
            return 0
        group = state.globals["get_data_parallel_group"](
            with_context_parallel=with_cp, partial_data_parallel=partial, with_gtp_remat=remat
        )
        return getattr(group, method)()

    def getter(with_context_parallel=False, partial_data_parallel=False, with_gtp_remat=True):  # type: ignore[no-untyped-def]
        value = whole if with_context_parallel else plain
        if value is not None and with_gtp_remat and not partial_data_parallel:
            return value
        return number(with_context_parallel, partial_data_parallel, with_gtp_remat)

    def kept(kind: str, with_cp: bool) -> Any:
        def ready() -> bool:
            return state.fixed(forced, BY_KIND[_with_remat(state, kind, True)].group)

        return state.kept(lambda: number(with_cp), ready)

    ask_plain, ask_whole = kept("dp", False), kept("dp_cp", True)

    def refresh() -> None:
        nonlocal plain, whole
        plain, whole = ask_plain(), ask_whole()

    state.refreshers.append(refresh)
    name = "rank" if word == "rank" else "world_size"
    what = "place of this rank in" if word == "rank" else "size of"
    return named(getter, f"get_data_parallel_{name}", f"The {what} the data-parallel group that the flags choose.")


def _expert(state: State) -> Iterator[Function]:
    def get_expert_data_parallel_group(  # type: ignore[no-untyped-def]
        check_initialized=True, partial_expert_data_parallel=False, with_gtp_remat=True
    ):
        """The ranks that hold the same experts; partial: those of one optimizer instance."""
        kind = "intra_ep_dp" if partial_expert_data_parallel else _with_remat(state, "ep_dp", with_gtp_remat)
        return state.group(kind, check_initialized)

    yield get_expert_data_parallel_group

    def get_data_modulo_expert_parallel_group(partial_expert_data_parallel=False):  # type: ignore[no-untyped-def]
        """Deprecated: get_expert_data_parallel_group."""
        warnings.warn(
            "get_data_modulo_expert_parallel_group is deprecated; call get_expert_data_parallel_group",
            DeprecationWarning,
            stacklevel=2,
        )
        return state.globals["get_expert_data_parallel_group"](
            partial_expert_data_parallel=partial_expert_data_parallel
        )

    yield get_data_modulo_expert_parallel_group

    def get_expert_data_parallel_group_gloo(partial_expert_data_parallel=False):  # type: ignore[no-untyped-def]
        """The CPU twin of the expert data-parallel group."""
        return state.group("intra_ep_dp_gloo" if partial_expert_data_parallel else "ep_dp_gloo")

    yield get_expert_data_parallel_group_gloo

    def expert(**flags: bool) -> Any:
        return state.globals["get_expert_data_parallel_group"](**flags)

    def get_expert_data_parallel_rank(partial_expert_data_parallel=False, with_gtp_remat=True):  # type: ignore[no-untyped-def]
        """The place of this rank in the expert data-parallel group."""
        if not in_a_world():
            return 0
        flags = {"partial_expert_data_parallel": partial_expert_data_parallel, "with_gtp_remat": with_gtp_remat}
        return expert(**flags).rank()

    yield get_expert_data_parallel_rank

    def get_expert_data_parallel_world_size(partial_expert_data_parallel=False, with_gtp_remat=True):  # type: ignore[no-untyped-def]
        """The size of the expert data-parallel group."""
        if not in_a_world():
            return 0
        flags = {"partial_expert_data_parallel": partial_expert_data_parallel, "with_gtp_remat": with_gtp_remat}
        return expert(**flags).size()

    yield get_expert_data_parallel_world_size

    def get_expert_tensor_model_pipeline_parallel_group(check_initialized=True, with_egtp_remat=False):  # type: ignore[no-untyped-def]
        """The ranks of one model's experts; with_egtp_remat: with those that hold other pieces of their weights."""
        return state.group(_with_remat(state, "tp_ep_pp", with_egtp_remat), check_initialized)

    yield get_expert_tensor_model_pipeline_parallel_group


def _joined(state: State) -> Iterator[Function]:
    def get_tensor_and_data_parallel_group(check_initialized=True, with_context_parallel=False):  # type: ignore[no-untyped-def]
        """Tensor and data parallel ranks together."""
        return state.group("tp_dp_cp" if with_context_parallel else "tp_dp", check_initialized)

    yield get_tensor_and_data_parallel_group

    def get_amax_reduction_group(with_context_parallel=False, tp_only_amax_red=False):  # type: ignore[no-untyped-def]
        """The ranks that agree on the largest value of an FP8 tensor."""
        if with_context_parallel:
            return state.group("tp_cp" if tp_only_amax_red else "tp_dp_cp")
        return state.group("tp" if tp_only_amax_red else "tp_dp")

    yield get_amax_reduction_group
