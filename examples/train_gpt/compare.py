"""Layouts against one process: the largest difference of any loss, as a Markdown table.

```
$ python examples/train_gpt/compare.py tp=2 cp=2 tp=2,pp=2,dp=2 --steps 50 --dtype float64
```

Each layout is a run of the command on as many ranks as its sizes multiply to.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from math import prod
from pathlib import Path
from typing import Annotated, Any

import typer

import rankmesh as rm

TRAIN = Path(__file__).with_name("train.py")


def run(layout: str, options: list[str], ranks: int) -> dict[str, Any]:
    """What the command told about one training."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    ended = subprocess.run(  # noqa: S603  - this file's own command
        [sys.executable, *launch, str(TRAIN), "--layout", layout, "--json", *options],
        env={"OMP_NUM_THREADS": "1", **os.environ},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if ended.returncode:
        raise typer.Exit(ended.returncode)
    result: dict[str, Any] = json.loads(ended.stdout)
    return result


def compare(
    layouts: Annotated[list[str], typer.Argument(metavar="SIZES...", help="Such as tp=2,pp=2,dp=2.")],
    groups: Annotated[str, typer.Option(help="In whose words the groups are made.")] = "rankmesh",
    steps: Annotated[int, typer.Option(min=1)] = 50,
    dtype: Annotated[str, typer.Option()] = "float64",
) -> None:
    """Train each layout and print its largest difference from one process."""
    options = ["--steps", str(steps), "--dtype", dtype]
    single = run("", options, 1)["losses"]
    typer.echo(f"| layout | ranks | largest difference of {steps} losses, {dtype} |\n| --- | --- | --- |")
    for layout in layouts:
        sizes = rm.Mesh.parse(layout).axes
        ranks = prod(size for name, size in sizes.items() if name != "ep")
        losses = run(layout, [*options, "--groups", groups], ranks)["losses"]
        largest = max(abs(a - b) for a, b in zip(losses, single, strict=True))
        typer.echo(f"| {layout.replace(',', ' ')} | {ranks} | {largest:.1e} |")


if __name__ == "__main__":
    typer.run(compare)
