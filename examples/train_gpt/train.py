"""Train a small transformer on any layout: the command.

```
$ python examples/train_gpt/train.py --steps 50
$ torchrun --nproc-per-node 8 examples/train_gpt/train.py --layout tp=2,pp=2,dp=2 --steps 50
```
"""

from __future__ import annotations

import json as jsons
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch.distributed import HashStore  # type: ignore[attr-defined]  # absent from its __all__

import gpt.survive
import rankmesh as rm
from gpt.layout import Refused, Sizes
from gpt.loop import DTYPES, GROUPS, Run, Step, Trainer
from gpt.model import Shape
from rankmesh.errors import RankmeshError

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", "0"))
LOCAL_WORLD_SIZE = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

BAD_REQUEST = 2
COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
MODEL, WORK, FILES = "The model and its batch", "How it is trained", "What it reads and writes"
LOSSES = "Losing ranks"


@app.command()
def train(
    layout: Annotated[
        str, typer.Option(metavar="SIZES", help="Sizes of tp, cp, dp, pp and ep; dp, left out, is what is left.")
    ] = "",
    groups: Annotated[
        str, typer.Option(metavar="|".join(GROUPS), help="In whose words the process groups are made.")
    ] = "rankmesh",
    steps: Annotated[int, typer.Option(min=1, help="Steps in all, those before --resume too.")] = 50,
    seed: Annotated[int, typer.Option(min=0, help="Of the first weights and of the batches.")] = 0,
    dtype: Annotated[str, typer.Option(metavar="|".join(DTYPES))] = "float32",
    rate: Annotated[float, typer.Option(min=0.0, help="Learning rate.", rich_help_panel=WORK)] = Run.rate,
    clip: Annotated[float, typer.Option(min=0.0, help="Largest norm of the gradients.", rich_help_panel=WORK)] = 1.0,
    layers: Annotated[int, typer.Option(min=1, rich_help_panel=MODEL)] = Shape.layers,
    hidden: Annotated[int, typer.Option(min=2, rich_help_panel=MODEL)] = Shape.hidden,
    heads: Annotated[int, typer.Option(min=1, rich_help_panel=MODEL)] = Shape.heads,
    experts: Annotated[int, typer.Option(min=0, help="Of every second block; 0: none.", rich_help_panel=MODEL)] = 4,
    top: Annotated[int, typer.Option(min=1, help="Experts that a token uses.", rich_help_panel=MODEL)] = Shape.top,
    sequence: Annotated[int, typer.Option(min=2, help="Bytes.", rich_help_panel=MODEL)] = Shape.sequence,
    batch: Annotated[int, typer.Option(min=1, help="Sequences of one step.", rich_help_panel=MODEL)] = Shape.batch,
    microbatches: Annotated[int, typer.Option(min=1, help="Of each replica.", rich_help_panel=MODEL)] = 2,
    survive: Annotated[
        bool, typer.Option("--survive", help="Go on without ranks that are lost.", rich_help_panel=LOSSES)
    ] = False,
    spares: Annotated[int, typer.Option(min=0, help="Ranks that wait to take over.", rich_help_panel=LOSSES)] = 0,
    shrink: Annotated[
        bool, typer.Option("--shrink", help="Without spares, go on with fewer replicas.", rich_help_panel=LOSSES)
    ] = False,
    redundancy: Annotated[
        int, typer.Option(min=0, help="Ranks that keep a copy of what one alone holds.", rich_help_panel=LOSSES)
    ] = 1,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds without a sign of life.", rich_help_panel=LOSSES)
    ] = 10.0,
    relayout: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STEP:SIZES", help="With --survive: go on with other sizes; repeat.", rich_help_panel=LOSSES
        ),
    ] = None,
    figure: Annotated[
        Path | None, typer.Option(help="The loss curve, a PNG: loss.png, with --json none.", rich_help_panel=FILES)
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Save here at the end.", rich_help_panel=FILES)
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest save, of any layout.", rich_help_panel=FILES)
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Losses and norms as JSON on stdout.", rich_help_panel=FILES)
    ] = False,
) -> None:
    """Train a small transformer on the text of Python's own documentation, byte by byte, with every axis there is.

    Started alone it is one process; under torchrun the ranks share the work as **--layout** says, and the losses are
    the same. Experts are laid over the ranks of dp and cp, so ep takes no ranks of its own.

    * python train.py
    * torchrun --nproc-per-node 8 train.py --layout tp=2,pp=2,dp=2
    * torchrun --nproc-per-node 16 train.py --layout tp=2,cp=2,pp=2,ep=2
    * torchrun --nproc-per-node 4 train.py --layout tp=2 --groups megatron

    torchrun ends all ranks when one is lost; with **--survive** start them by a launcher that does not:

    * srun --no-kill --kill-on-bad-exit=0 -n 9 python train.py --layout tp=2,pp=2 --survive --spares 1

    In such a job **--relayout** changes the sizes while it runs:

    * torchrun --nproc-per-node 8 train.py --layout tp=2,pp=2 --survive --relayout 20:tp=2 --relayout 40:cp=2,ep=2
    """
    shape = Shape(layers, hidden, heads, experts, top, sequence, batch, microbatches)
    figure = Path("loss.png") if figure is None and not json else figure
    run = Run(shape, steps, seed, rate, clip, dtype)
    with refusals():
        ranks = WORLD_SIZE - spares if survive else WORLD_SIZE
        sizes = _checked(run, layout, groups, checkpoint, resume, ranks, draws=figure is not None)
        if relayout and not survive:
            raise Refused("--relayout needs --survive; add it")
        if survive:
            copies = min(redundancy, ranks - 1)
            changes = _changes(run, relayout or [], ranks, copies)
            _survive(run, layout, sizes, (spares, shrink, copies, timeout), changes, figure, json)
            return
        with world() as device, GROUPS[groups](sizes) as made:
            trainer = Trainer(run, made, device)
            start = trainer.resume(checkpoint) if resume and checkpoint else 0
            result, seconds = _steps(trainer, start, sizes)
            if checkpoint:
                trainer.save(checkpoint, steps)
    if RANK == 0:
        _report(run, sizes, result, seconds, figure, json)


def _checked(
    run: Run, layout: str, groups: str, checkpoint: Path | None, resume: bool, ranks: int, *, draws: bool
) -> Sizes:
    """The sizes, once nothing speaks against the run."""
    for what, given, known in (("groups", groups, GROUPS), ("dtype", run.dtype, DTYPES)):
        if given not in known:
            raise Refused(f"--{what} {given} is unknown; give one of {', '.join(known)}")
    if resume and checkpoint is None:
        raise Refused("--resume needs --checkpoint; give the folder to resume from")
    if draws and find_spec("matplotlib") is None:
        raise Refused("the loss curve needs matplotlib, which is not installed; pip install -e '.[examples]'")
    sizes = Sizes.parse(layout, ranks)
    run.shape.check(sizes)
    return sizes


@contextmanager
def world() -> Iterator[torch.device]:
    """The ranks that torchrun started, or this process alone; the device of this rank."""
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= LOCAL_WORLD_SIZE
    device = torch.device("cuda", LOCAL_RANK) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend, limit = "nccl" if cuda else "gloo", timedelta(minutes=5)
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=limit)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        yield device
    finally:
        dist.destroy_process_group()


@contextmanager
def refusals() -> Iterator[None]:
    """What cannot be run is one sentence, told by one rank."""
    try:
        yield
    except (Refused, RankmeshError) as error:
        # torchrun ends all ranks as soon as one has failed: the one that speaks is the first.
        if RANK == 0:
            typer.echo(f"error: {error}", err=True)
        else:
            time.sleep(2.0)
        raise typer.Exit(BAD_REQUEST) from None


def _steps(trainer: Trainer, start: int, sizes: Sizes) -> tuple[list[Step], float]:
    """Train, with a bar on rank 0; what each step told, and the seconds that all took."""
    run = trainer.run
    if start >= run.steps:
        raise Refused(f"--steps {run.steps} are not more than the {start} that the checkpoint has done; give more")
    result: list[Step] = []
    began = time.perf_counter()
    with Progress(*COLUMNS, console=Console(stderr=True), disable=RANK > 0) as progress:
        task = progress.add_task(str(sizes), total=run.steps, completed=start)
        for step in trainer.steps(start):
            result.append(step)
            speed = len(result) * run.shape.batch * run.shape.sequence / (time.perf_counter() - began)
            progress.update(task, advance=1, description=f"{sizes}  loss {step.loss:.4f}  {speed:,.0f} tokens/s")
    return result, time.perf_counter() - began


def _changes(run: Run, given: list[str], ranks: int, copies: int) -> dict[int, str]:
    """The sizes to go on with after some steps; without dp they are of as many ranks as the first ones."""
    found = {}
    for one in given:
        step, _, text = one.partition(":")
        if not step.isdecimal():
            raise Refused(f"--relayout {one} is not a step and sizes; give them, such as 10:tp=2,pp=2")
        axes = rm.Mesh.parse(text).axes if text else {}
        world = axes["dp"] * axes.get("tp", 1) * axes.get("cp", 1) * axes.get("pp", 1) if "dp" in axes else ranks
        run.shape.check(Sizes.parse(text, world))
        if world <= copies:
            raise Refused(
                f"--relayout {one} leaves {world} ranks for --redundancy {copies}; add --redundancy {world - 1}"
            )
        found[int(step)] = text
    return found


def _survive(
    run: Run,
    layout: str,
    sizes: Sizes,
    how: tuple[int, bool, int, float],
    changes: dict[int, str],
    figure: Path | None,
    json: bool,
) -> None:
    """Train in a job that survives; the bar and the report are of whichever process is the first rank."""
    spares, shrink, redundancy, timeout = how
    began = time.perf_counter()
    with Progress(*COLUMNS, console=Console(stderr=True)) as progress:
        task = progress.add_task(str(sizes), total=run.steps, visible=False)

        def done(now: Sizes, step: Step) -> None:
            text = f"{now}  loss {step.loss:.4f}"
            progress.update(task, completed=step.index + 1, description=text, visible=True)

        result = gpt.survive.survive(run, layout, spares, shrink, timeout, done, changes, redundancy)
    if result is not None:
        _report(run, *result, time.perf_counter() - began, figure, json)


def _report(run: Run, sizes: Sizes, result: list[Step], seconds: float, figure: Path | None, json: bool) -> None:
    if figure is not None:
        from gpt.figures import draw

        draw(figure, result, f"{sizes}, {run.dtype}")
    if json:
        losses, norms = [step.loss for step in result], [step.norm for step in result]
        values = {"layout": str(sizes), "dtype": run.dtype, "seconds": seconds, "losses": losses, "norms": norms}
        typer.echo(jsons.dumps(values))
    else:
        typer.echo(f"loss {result[0].loss:.4f} -> {result[-1].loss:.4f} in {len(result)} steps; curve in {figure}")


if __name__ == "__main__":
    app()
