"""Tests that need a GPU and a torch with NCCL, and are skipped, with the reason, where there is none.

The ranks of a test share what GPUs there are, which NCCL allows since 2.30 (torch 2.14) where it is told so.
"""

import ctypes
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist


def pytest_collection_modifyitems(items):
    """Skip what cannot run here."""
    reason = _absent()
    if not reason:
        # Before any rank is started: they inherit it.
        os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    else:
        for item in items:
            if item.path.is_relative_to(Path(__file__).parent):
                item.add_marker(pytest.mark.skip(reason=reason))


def _absent():
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return "no GPU, or a torch without NCCL"
    # What torch says is the version that it was built with, not the one that it has loaded.
    version = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    if version.value < 23000:
        return f"NCCL {version.value}: before 2.30 ranks cannot share a GPU"
    return ""
