"""``rankmesh checkpoint``: convert a checkpoint in files to another format, every tensor bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from rankmesh.cli.columns import bytes_text
from rankmesh.cli.console import progress_bar, write
from rankmesh.cli.shell import Answer
from rankmesh.errors import extra

__all__ = ["command"]


def command(
    action: Annotated[Literal["convert"], typer.Argument(metavar="convert", help="What to do: convert.")],
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="The folder of a checkpoint: Hugging Face's safetensors, torch's distributed checkpoint (.metadata), "
            "Megatron's torch_dist (iter_0001000), or what rankmesh saved.",
        ),
    ],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="A new folder.")],
    to: Annotated[
        Literal["safetensors", "dcp"],
        typer.Option(
            help="safetensors: whole tensors, as Hugging Face has them; dcp: torch.distributed.checkpoint, which "
            "torchtitan and FSDP load under any layout."
        ),
    ],
    leave_out: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Names to leave out, such as 'optimizer.*'; may be repeated."),
    ] = None,
) -> Answer:
    """Convert a checkpoint to another format, without a GPU, a job or the program that wrote it.

    Configuration and tokenizer files beside the tensors are copied. Every tensor keeps its name and its bits: nothing
    is split, fused or renamed. A tensor that would need it, such as Megatron's fused tensors to safetensors, is refused
    by name before anything is written. Opening a checkpoint runs no code from it. Memory stays below 256 MiB and twice
    the largest chunk of the source, whatever the size of the model.

    $ rankmesh checkpoint convert ./Llama-3.1-8B ./llama-dcp --to dcp
    $ rankmesh checkpoint convert ./step-1000 ./model --to safetensors --leave-out 'optimizer.*'
    $ rankmesh checkpoint convert ./iter_0001000 ./dcp --to dcp --leave-out 'optimizer.*' --leave-out '*_extra_state*'
    """
    with extra("files"):
        from rankmesh.transfer.convert import beside, convert

    with progress_bar("converting", "bytes") as (progress, _):
        sizes = convert(source, target, to, leave_out=leave_out or (), progress=progress)
    total, copied = sum(sizes.values()), beside(source)
    return Answer(
        lambda: {
            "target": str(target),
            "format": to,
            "tensors": len(sizes),
            "bytes": total,
            **({"copied": copied} if copied else {}),
        },
        lambda: write(
            f"wrote {len(sizes):,} tensors, {bytes_text(total)}, to {target} ({to})"
            + (f"; copied {', '.join(copied)}" if copied else "")
        ),
    )
