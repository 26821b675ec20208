"""The section of docs/benchmarks.md on published runs: what ``bench/published.json`` has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["published_section"]


def published_section(found: Mapping[str, Any]) -> Iterator[str]:
    """The lines of the section."""
    rows: Sequence[Mapping[str, Any]] = found["rows"]
    main = [row for row in rows if not row["beyond"]]
    near = {share: sum(abs(row["ratio"] - 1) <= share / 100 for row in main) for share in (15, 20)}
    best = sum(1 <= row["rank"] <= 5 for row in main)
    fits = sum(row["rank"] > 0 for row in main)
    yield from ("", "## Search and published runs", "")
    yield (
        f"`rankmesh search` predicts {len(main)} published configurations (first table). All can be expressed. "
        f"{near[15]} are within 15 % of the published step, {near[20]} within 20 %. {fits} fit the device's memory as "
        f"predicted, and {best} are among the five best of those that fit. The second table has further runs. "
        "`python -m bench.published`, whose rows and sources are in `tests/placement/published.json`"
    )
    yield ""
    yield (
        "Ratio: predicted step over published step. Rank: the place of the published sizes among all sizes that fit, "
        "with everything else as published; 0 if the prediction does not fit. What a source leaves open (microbatch, "
        "virtual stages, recomputation) is chosen as `search` chooses it, and shown. Memory: predicted, and measured "
        "where it is published, in GiB of the fullest device. Calculon: its ratio for the rows that it can express "
        "(GPT models on A100; commit caa4b11, its own figures of the A100); refused: it does not fit its memory."
    )
    yield ""
    yield (
        "The same constants hold for every row: large matrix products reach 78 % of the peak of the data sheet, "
        "attention 45 %, kernels that move bytes 80 % of the memory's bandwidth; links reach 80 % of theirs; "
        "computation loses 10 % of the time of communication that hides behind it. They were chosen with the first "
        "table in view, the memory column included, as round numbers for all rows, so it is no blind test. Of single "
        "rows, what the source leaves open was settled after a first comparison: ZeRO 1 for Llama 3, 912 TFLOP/s for "
        "torchtitan's H100s, DualPipe for DeepSeek-V3. Megatron-LM's own table "
        "publishes TFLOP/s by a formula that counts recomputation; the step follows from it. Its figures, and "
        "those of MegaScale, Llama 3 and DeepSeek-V3, are those of the cited papers; the others were read in the "
        "repositories."
    )
    yield ""
    yield (
        "Known gaps. torchtitan's H100s ran at 500 W, and its authors put their peak between 835 and 989 TFLOP/s; 912 "
        "is taken, and the loss of clock under load is not modelled. DeepSeek-V3 keeps more in FP8 than is predicted, "
        "and sends each token to at most four hosts; its prediction takes more memory than there is. Qwen3 30B sent "
        "each token once to each host (HybridEP); here it sends one copy to each expert. The kernels of GPT-OSS "
        "(attention with sinks, bias, clamped activation) are counted as usual ones."
    )
    yield from _table(main)
    yield from _table([row for row in rows if row["beyond"]])


def _table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    head: tuple[str, ...] = ("run", "sizes", "left open", "published", "predicted", "ratio", "rank")
    head = (*head, "memory, measured", "Calculon", "source")
    yield from ("", f"| {' | '.join(head)} |", f"| {' | '.join(['---'] * len(head))} |")
    for row in rows:
        sizes = ",".join(f"{name}={size}" for name, size in row["sizes"].items())
        chosen = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in row["chosen"].items())
        other, measured = row.get("calculon", ""), row["measured"]
        yield (
            f"| {row['name']} | {sizes} | {chosen} | {row['published']:.3g} s | {row['predicted']:.3g} s | "
            f"{row['ratio']:.2f} | {row['rank']} of {row['fitting']} | {row['memory']:.1f}"
            f"{f', {measured:.1f}' if measured else ''} | "
            f"{'refused' if other is None else other and f'{other:.2f}'} | {row['source']} |"
        )
