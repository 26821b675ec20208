"""``rankmesh checkpoint convert``: what it prints, and what it refuses."""

import json
import shlex

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from rankmesh.cli.shell import ExitCode


def test_a_conversion_says_what_it_wrote(rankmesh, tmp_path):
    """One line, or JSON; the tensors are those of the source."""
    whole = {"w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(5, dtype=torch.bfloat16)}
    dcp.save(dict(whole), checkpoint_id=tmp_path / "from", no_dist=True)
    ran = rankmesh("checkpoint", "convert", tmp_path / "from", tmp_path / "to", "--to", "safetensors")
    assert (ran.code, ran.out) == (ExitCode.OK, f"wrote 2 tensors, 58 B, to {tmp_path / 'to'} (safetensors)\n")
    found = load_file(tmp_path / "to" / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())
    ran = rankmesh("checkpoint", "convert", tmp_path / "to", tmp_path / "dcp", "--to", "dcp", "--json")
    assert json.loads(ran.out) == {"target": str(tmp_path / "dcp"), "format": "dcp", "tensors": 2, "bytes": 58}


def test_what_is_refused_is_named_and_can_be_left_out(rankmesh, tmp_path):
    """An object in the checkpoint: its name, and an option that works as it is written."""
    dcp.save({"w": torch.ones(3), "rng": "state"}, checkpoint_id=tmp_path / "from", no_dist=True)
    arguments = ("checkpoint", "convert", tmp_path / "from", tmp_path / "to", "--to", "dcp")
    ran = rankmesh(*arguments)
    assert (ran.code, ran.out) == (ExitCode.BAD_SPEC, "")
    assert "--leave-out '*rng*'" in ran.err
    assert not (tmp_path / "to").exists()
    assert rankmesh(*arguments, "--leave-out", "*rng*").code == ExitCode.OK


def test_the_options_that_an_error_proposes_leave_no_other_tensor_out(rankmesh, tmp_path):
    """Several objects, one of whose names is a part of a tensor's."""
    objects = {"step": 7, "optimizer.lr": 0.1, "the name": "x"}
    dcp.save({"step_embedding": torch.ones(3), **objects}, checkpoint_id=tmp_path / "from", no_dist=True)
    arguments = ("checkpoint", "convert", tmp_path / "from", tmp_path / "to", "--to", "safetensors")
    ran = rankmesh(*arguments)
    assert ran.code == ExitCode.BAD_SPEC
    proposed = shlex.split(ran.err.partition("leave them out: ")[2])
    assert rankmesh(*arguments, *proposed).code == ExitCode.OK
    assert set(load_file(tmp_path / "to" / "model.safetensors")) == {"step_embedding"}
