"""Megatron's ``pretrain_gpt.py``, unmodified, on four gloo ranks: over its own modules, then over the drop-ins.

Each side saves a checkpoint midway, and continues from the other's.
``make test-peers MEGATRON=checkout JOBS=0 ARGS='-k pretrain'``: the wheels have its training loop, but not the script.
"""

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from tests.peers.conftest import REPOSITORY
from tests.sockets import free_port

RANKS, STEPS, SAVED, LIMIT = 4, 4, 2, 500
MEGATRON, DROP_INS = "megatron", "drop-ins"
PARALLEL = {
    "TP 2, PP 2": ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"],
    "PP 2, VPP 2": ["--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1"],
    "EP 2": ["--expert-model-parallel-size", "2", "--num-experts", "4", "--moe-token-dispatcher-type", "allgather",
             "--moe-router-load-balancing-type", "none", "--moe-aux-loss-coeff", "0"],
}  # fmt: skip
MODEL = {
    "num-layers": 4, "hidden-size": 32, "num-attention-heads": 4, "seq-length": 16, "max-position-embeddings": 16,
    "micro-batch-size": 1, "global-batch-size": 8, "train-iters": STEPS, "lr": 0.01, "vocab-size": 127,
    "tokenizer-type": "NullTokenizer", "transformer-impl": "local", "attention-dropout": 0, "hidden-dropout": 0,
    "distributed-backend": "gloo", "eval-iters": 0, "eval-interval": 1000, "log-interval": 1, "split": "90,5,5",
    "num-workers": 0,
}  # fmt: skip
WITHOUT = (
    "gradient-accumulation-fusion", "persist-layer-norm", "masked-softmax-fusion", "bias-gelu-fusion",
    "bias-dropout-fusion", "rope-fusion", "create-attention-mask-in-dataloader",
)  # fmt: skip
ARGUMENTS = [
    *(token for name, value in MODEL.items() for token in (f"--{name}", str(value))),
    *(f"--no-{name}" for name in WITHOUT),
    "--mock-data", "--use-cpu-initialization", "--disable-bias-linear",
]  # fmt: skip


def pretrain(checkout, side, arguments, folder):
    """What each rank recorded of every step."""
    folder.mkdir()
    world = {"WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(),
             "CUDA_DEVICE_MAX_CONNECTIONS": 1, "OMP_NUM_THREADS": 1, "TORCHDYNAMO_DISABLE": 1,
             "PYTHONPATH": REPOSITORY}  # fmt: skip
    ranks = []
    for rank in range(RANKS):
        environment = {**world, "RANK": rank, "LOCAL_RANK": rank}
        ranks.append(
            subprocess.Popen(
                [sys.executable, str(REPOSITORY / "tests/peers/megatron_pretrain.py"), side,
                 str(folder / f"{rank}.json"), *ARGUMENTS, *arguments],
                cwd=checkout,
                env=os.environ | {name: str(value) for name, value in environment.items()},
                stdout=(folder / f"{rank}.log").open("w"),
                stderr=subprocess.STDOUT,
            )
        )  # fmt: skip
    try:
        for rank, program in enumerate(ranks):
            assert program.wait(LIMIT) == 0, (folder / f"{rank}.log").read_text(encoding="utf-8")[-3000:]
    finally:
        for program in ranks:
            with suppress(ProcessLookupError):
                program.kill()
            program.wait()
    return [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(RANKS)]


@pytest.fixture(scope="module")
def checkout():
    """Megatron's sources: the last of those that ``MEGATRON`` names."""
    named = os.environ.get("MEGATRON", "").split(os.pathsep)[-1]
    if not named:
        pytest.skip("MEGATRON names no checkout")
    return Path(named).resolve()


@pytest.fixture(scope="module", params=PARALLEL)
def trained(request, checkout, tmp_path_factory):
    """Four steps of one layout over each side, which saves after the second: where, the layout, what ranks recorded."""
    place, layout = tmp_path_factory.mktemp("pretrain"), PARALLEL[request.param]
    result = {}
    for side in (MEGATRON, DROP_INS):
        saved = ["--save", str(place / f"{side}-saved"), "--save-interval", str(SAVED)]
        result[side] = pretrain(checkout, side, [*layout, *saved], place / side)
    return place, layout, result


@pytest.mark.timeout(2 * LIMIT)
def test_pretrain_gpt(trained):
    """Four steps of each layout: the losses and gradient norms of every rank are equal, bit for bit."""
    _, _, result = trained
    local, ours = result[MEGATRON], result[DROP_INS]
    assert {rank["mpu"] for rank in local} == {"megatron.core.parallel_state"}
    assert {rank["mpu"] for rank in ours} == {"rankmesh.dialects.megatron.parallel_state"}
    assert [rank["steps"] for rank in ours] == [rank["steps"] for rank in local]
    assert all(len(rank["steps"]) == STEPS for rank in local)
    assert all(norm > 0 for rank in local for _, norm in rank["steps"])
    assert any(loss["lm loss"] > 0 for rank in local for loss, _ in rank["steps"] if loss)


@pytest.mark.timeout(2 * LIMIT)
@pytest.mark.parametrize(("saver", "loader"), [(MEGATRON, DROP_INS), (DROP_INS, MEGATRON)])
def test_pretrain_gpt_continues_from_a_checkpoint_of_the_other(trained, checkout, saver, loader):
    """The steps after the checkpoint have the losses and norms of the run that saved it; no file of it names us."""
    place, layout, result = trained
    saved = place / f"{saver}-saved"
    files = [file for file in saved.rglob("*") if file.is_file()]
    assert len(files) > RANKS
    assert not [file for file in files if b"rankmesh.dialects" in file.read_bytes()]
    loaded = ["--load", str(saved), "--ckpt-step", str(SAVED), "--exit-on-missing-checkpoint"]
    continued = pretrain(checkout, loader, [*layout, *loaded], place / f"{loader}-continues")
    assert [rank["steps"] for rank in continued] == [rank["steps"][SAVED:] for rank in result[saver]]
