"""The environment that UCC's pipeline groups need: what the user set stays, where Megatron-Core lets it stay.

Source: NVIDIA Megatron-Core 0.16.1, ``core.parallel_state.initialize_model_parallel``.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from rankmesh.dialects.megatron.refusals import Refused

__all__ = ["prepare_environment"]

_UNLESS_SET = {"TORCH_UCC_BLOCKING_WAIT": "none", "UCC_EC_CUDA_STREAM_TASK_MODE": "driver", "UCX_TLS": "ib,cuda_copy"}
_ALWAYS = {
    "NSYS_UCP_COMM_PARAMS": "1",
    "UCX_RNDV_THRESH": "0",
    "UCX_NET_DEVICES": "all",
    "UCC_CL_BASIC_TLS": "^sharp,nccl",
}


def prepare_environment(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set UCC's variables.

    >>> variables = {"UCX_TLS": "tcp"}
    >>> prepare_environment(variables)
    >>> variables["UCX_TLS"], variables["UCX_NET_DEVICES"]
    ('tcp', 'all')
    """
    if environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        raise Refused(
            "received CUDA_DEVICE_MAX_CONNECTIONS=1 with UCC for the pipeline, whose transfers would then wait for "
            "each other; set it to more than 1, or unset it"
        )
    for name, value in _UNLESS_SET.items():
        environment.setdefault(name, value)
    environment.update(_ALWAYS)
