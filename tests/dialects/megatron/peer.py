"""megatron-core's parallel state beside ours, in dry worlds: what each answers, as plain data."""

import itertools
import warnings

import torch.distributed as dist
from tests.dialects import dry

from rankmesh.dialects.megatron import parallel_state as ours

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import megatron.core.parallel_state as peer

PRISTINE = {
    name: value
    for name, value in vars(peer).items()
    if name.startswith("_") and not name.startswith("__") and not callable(value)
}
GLOBALS = sorted(PRISTINE.keys() - {"_GLOBAL_MEMORY_BUFFER"})
TAKES = peer.initialize_model_parallel.__code__.co_varnames[: peer.initialize_model_parallel.__code__.co_argcount]
FLAGS = {
    "check_initialized": (True, False),
    "with_context_parallel": (False, True),
    "partial_data_parallel": (False, True),
    "independent_all_gather": (False, True),
    "partial_expert_data_parallel": (False, True),
    "tp_only_amax_red": (False, True),
    "ignore_virtual": (True, False),
    "vp_stage": (None, 0, 1, 2),
    "group_size": (2, 3, 4, 8),
    "with_gtp_remat": (True, False),
    "with_egtp_remat": (True, False),
}


def questions():
    """Every getter of the peer with every combination of its flags."""
    for name, function in sorted(vars(peer).items()):
        if name.startswith(("get_", "is_", "has_", "model_parallel_is")) and name != "get_nccl_options":
            if not hasattr(function, "__code__") or name == "is_torch_min_version" or "memory_buffer" in name:
                continue
            flags = function.__code__.co_varnames[: function.__code__.co_argcount]
            for values in itertools.product(*(FLAGS[flag] for flag in flags)):
                yield name, dict(zip(flags, values, strict=True))


QUESTIONS = tuple(questions())


def plain(value):
    """An answer as data: a process group as its members and this rank's place."""
    if isinstance(value, dist.ProcessGroup):
        return {"ranks": dist.get_process_group_ranks(value), "rank": value.rank(), "size": value.size()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


def distinct(groups):
    """Groups of several ranks as data, each set of members once; None, which stands for the world, as nothing."""
    return sorted({tuple(group["ranks"]) if group else () for group in groups if not group or group["size"] > 1})


def answer(function, arguments):
    """What a function returns, or the error that it raises."""
    try:
        return plain(function(**arguments))
    except Exception as error:  # noqa: BLE001  - errors are compared too
        return error


def same(our_error, peer_error):
    """Equal answers; where the peer raises, an error that whoever catches the peer's catches too."""
    if isinstance(peer_error, Exception):
        return isinstance(our_error, type(peer_error))
    return type(our_error) is type(peer_error) and our_error == peer_error


def answers(state):
    """Every question's answer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [answer(getattr(state, name), arguments) for name, arguments in QUESTIONS]


def world(rank, size):
    """A world of this size that is not there, in which this process plays one rank."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dry.begin(rank, size)


def without_gloo(**arguments):
    """The peer's create_group in a dry world, where no other rank connects gloo groups."""
    return PRISTINE_CREATE(**{**arguments, "backend": None})


PRISTINE_CREATE = peer.create_group


def start_peer(arguments):
    """Initialise the peer from its first state; the error that it raises, or None."""
    vars(peer).update(PRISTINE)
    if "_HYBRID_DP_CP_GROUPS" in PRISTINE:
        peer._HYBRID_DP_CP_GROUPS = {}
    peer.create_group = lambda ranks, **options: without_gloo(ranks=ranks, **options)
    try:
        peer.initialize_model_parallel(**arguments)
    except Exception as error:  # noqa: BLE001  - refusals are compared
        return error
    finally:
        peer.create_group = PRISTINE_CREATE
    return None


def start_ours(arguments):
    """Initialise ours; the error that it raises, or None."""
    try:
        ours.initialize_model_parallel(**arguments)
    except Exception as error:  # noqa: BLE001  - refusals are compared
        return error
    return None
