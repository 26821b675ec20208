"""Megatron's training loop is imported under ``install()``: ``python -m tests.peers.megatron_imports``."""

import importlib
import typing

from tests.peers import stand_ins

from rankmesh.dialects.megatron import install, parallel_state

stand_ins.triton()
typing.override = getattr(typing, "override", lambda function: function)  # it is written for Python 3.12


if __name__ == "__main__":
    install()
    training = importlib.import_module("megatron.training.training")
    print(training.mpu is parallel_state)  # noqa: T201
