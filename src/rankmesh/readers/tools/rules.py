"""Rules of lint: sizes that divide what is known of the model, the batch of DeepSpeed, the engine of rollouts.

The model is known by options of the file, by a ``config.json`` beside it or in Hugging Face's cache, or by its name. A
fix is tried before it is proposed, with the fixes before it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from rankmesh.core.documents import Unreadable, parse_json, read_text
from rankmesh.core.explain import arithmetic
from rankmesh.core.grouped import grouped
from rankmesh.core.plan import Plan
from rankmesh.readers.config import Layout
from rankmesh.readers.models import counts, named_counts
from rankmesh.readers.options import DOCUMENTS, Option
from rankmesh.readers.plans import fitting, is_plan, smaller, written
from rankmesh.readers.tools.finding import Finding

__all__ = ["LARGEST", "Checked", "of_model", "valid"]

# Bytes of a file that is read.
LARGEST = 256 << 10


@dataclass
class Checked:
    """A layout that is checked; ``problem``: why its sizes do not fit, empty where they do or where some are unknown.

    ``given``: its arguments with the fixes found so far; a world size that follows from the sizes is None.
    """

    layout: Layout
    problem: str = ""
    given: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        stated = any(reading.argument == "world_size" for reading in self.layout.readings)
        self.given = {**self.layout.arguments, **({} if stated else {"world_size": None})}

    def fits(self, changed: Mapping[str, Any]) -> bool:
        """Return whether the sizes fit with these changes, as far as the world is known."""
        return not self.layout.known or is_plan(self.layout.recipe, {**self.given, **changed})


# -- rules of the layout's own sizes ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Check:
    """A size that divides a count of the model: its argument, the count, and the names that files have for it."""

    code: str
    argument: str
    count: str
    names: Sequence[str]
    either: bool = False  # or the count divides the size: what it counts is copied

    def fits(self, size: int, count: int) -> bool:
        return count % size == 0 or (self.either and size % count == 0)


# The names are those of configs and scripts, without dashes. A size of heads of keys may be larger.
_HEADS = (
    _Check("heads", "tp", "heads", ("num_attention_heads",)),
    _Check("heads", "tp", "kv_heads", ("num_query_groups", "num_key_value_heads"), either=True),
)
_EXPERTS = _Check(
    "experts", "ep", "experts", ("num_experts", "num_moe_experts", "num_local_experts", "n_routed_experts")
)
_LAYERS = _Check("layers", "pp", "layers", ("num_layers", "num_hidden_layers"))
# Arguments with which stages have different numbers of layers.
_UNEVEN = re.compile(
    r"(first|last)_pipeline|pipeline_model_parallel_layout|account_for|pipeline_split|mtp_num_layers|num_layer_list|noop_layers"
)


def _checks(layout: Layout) -> Iterator[_Check]:
    """Yield the rules of the program that has the layout.

    vLLM and SGLang take uneven stages, vLLM also uneven experts; verl's Ulysses cuts heads.
    """
    stated = {option.name for option in layout.stated}
    yield from _HEADS
    if layout.format == "verl":
        yield from (replace(check, argument="sp") for check in _HEADS)
    if not any("redundant_experts" in name for name in stated):
        yield _EXPERTS
    # What is unknown may make the stages uneven.
    if layout.format == "megatron" and not any(_UNEVEN.search(name) or name[:1] in "$`" for name in stated):
        yield _LAYERS


@dataclass(frozen=True)
class _Rule:
    """A size that has to divide a count of the model: the option of the size, the count, and the model in words.

    ``shares``: replicas of attention, among which the size is divided.
    """

    check: _Check
    option: Option
    size: int
    count: Option
    model: str = ""
    shares: int = 1

    def fits(self, size: int) -> bool:
        return size % self.shares == 0 and self.check.fits(size // self.shares, int(self.count.first))

    def smaller(self) -> list[int]:
        """Return the sizes that may do instead, the largest first."""
        return [each * self.shares for each in smaller(self.size // self.shares, int(self.count.first))]

    def finding(self, layout: Layout, value: int | None, spec: str | None) -> Finding:
        over = f"{self.size // self.shares} ({self.option} over {self.shares} replicas)"
        place = f" (line {self.count.line})" if self.count.line else ""
        message = f"{over if self.shares > 1 else self.option} does not divide {self.count}{self.model}{place}"
        fix, edit = None, None
        if value is not None:
            fix, edit = f"{self.check.argument}={value}", written(self.option.path, value, layout.path)
        return Finding(layout.path, self.option.line, self.check.code, message, fix, spec, edit)


def valid(plan: Plan, layout: Layout) -> Iterator[str]:
    """Yield why a layout is valid, and what of the model is not known, and so not checked."""
    yield from arithmetic(plan.mesh)
    checks = [check for check in _checks(layout) if layout.arguments.get(check.argument, 1) > 1]
    unknown = dict.fromkeys(check.code for check in checks if _count(layout, check) is None)
    if unknown:
        yield f"the numbers of {', '.join(unknown)} of the model are not known, and not checked"


def of_model(checked: Checked) -> Iterator[Finding]:
    """Yield sizes that do not fit the world, and each size that does not divide what is known of the model."""
    layout, given = checked.layout, checked.given
    spec = layout.spec(layout.arguments["world_size"]) if layout.known and not checked.problem else None
    by_argument = grouped((rule.check.argument, rule) for rule in _rules(layout))

    def works(name: str, value: int) -> bool:
        return all(rule.fits(value) for rule in by_argument.get(name, ())) and checked.fits({name: value})

    if checked.problem:
        found = fitting(given, lambda sizes: all(works(*item) for item in sizes.items() - given.items()))
        yield _of_sizes(checked, found)
        given |= [found] if found else []
    for argument, rules in by_argument.items():
        for rule in [rule for rule in rules if not rule.fits(rule.size)][:1]:
            value = next((each for each in rule.smaller() if works(argument, each)), None)
            yield rule.finding(layout, value, spec)
            given |= {} if value is None else {argument: value}
    yield from _of_rollouts(layout)
    yield from _of_batch(layout)


def _of_sizes(checked: Checked, found: tuple[str, int] | None) -> Finding:
    """Return the finding of sizes that do not fit, at the line of the size that its fix changes."""
    layout = checked.layout
    changed = found[0].replace("etp", "ep") if found else "world_size"
    sizes = sorted(layout.readings, key=lambda each: each.argument == "world_size")
    places = {each.argument: each.line for each in sizes if each.argument in layout.arguments}
    line = places.get(changed, next(iter(places.values()), None))
    fix = f"{found[0]}={found[1]}" if found else None
    return Finding(layout.path, line, "sizes", checked.problem, fix, None, found and layout.spelled(*found))


def _rules(layout: Layout) -> Iterator[_Rule]:
    """Yield the rules of the layout's own sizes, as far as the model is known."""
    # SGLang shares its tensor parallel ranks among replicas of attention.
    shared = prod(layout.arguments.get(name, 1) for name in ("attn_dp", "attn_cp")) if layout.format == "sglang" else 1
    for check in _checks(layout):
        reading = next((each for each in layout.readings if each.argument == check.argument), None)
        found = _count(layout, check) if reading is not None else None
        if reading is not None and found is not None:
            size = int(layout.arguments.get(check.argument, 1))
            yield _Rule(check, reading.single, size, *found, shared if check.code == "heads" else 1)


# -- beside the layout: the batch, and the engine of rollouts ---------------------------------------------------------

_BATCH, _MICRO, _STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
# The tensor parallel size of the engine of rollouts beside a trainer.
_ROLLOUTS = {
    "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "policy.generation.vllm_cfg.tensor_parallel_size",
    "--rollout-num-gpus-per-engine",
    "--vllm_tensor_parallel_size",
}


def _of_batch(layout: Layout) -> Iterator[Finding]:
    """Yield a finding where DeepSpeed's batch is not micro batch x accumulation x data parallel ranks."""
    found = {each.name: each for each in layout.stated if len(each.path) == 1 and type(each.value) is int}
    if layout.format != "deepspeed" or not {_BATCH, _MICRO} <= found.keys():
        return
    batch, micro, steps = found[_BATCH], found[_MICRO], found.get(_STEPS)
    block, shown_block = micro.value, str(micro)
    if steps is not None:
        block, shown_block = micro.value * steps.value, f"{micro} x {steps}"
    shards = layout.arguments.get("tp", 1) * layout.arguments.get("sp", 1)
    ranks = (layout.arguments["world_size"] or 1) // shards if layout.known else 1
    wrong = batch.value != block * ranks if steps is not None and layout.known else batch.value % (block * ranks)
    if block and wrong:
        across = f" x {ranks} data parallel ranks" if layout.known else ""
        message = f"{batch} is not {shown_block}{across}, nor a multiple"
        if steps is not None and layout.known:
            message = f"{batch} is not {shown_block}{across} = {block * ranks}"
        value = block * ranks if layout.known else max(1, batch.value // block) * block
        edit = written(batch.path, value, layout.path if layout.path.endswith(DOCUMENTS) else ".json")
        yield Finding(layout.path, batch.line, "batch", message, edit, None, edit)


def _of_rollouts(layout: Layout) -> Iterator[Finding]:
    """Yield a finding where the engine of rollouts has a size that does not divide the heads of the model."""
    world = layout.arguments["world_size"] or 0  # engines share its ranks
    for option in (option.single for option in layout.stated if option.key in _ROLLOUTS):
        if not re.fullmatch(r"[1-9]\d{0,4}", str(option.value)):
            continue
        size, known = int(option.value), [(check, _count(layout, check)) for check in _HEADS]
        rules = [_Rule(check, option, size, *found) for check, found in known if found]
        for rule in [rule for rule in rules if not rule.fits(size)][:1]:
            fitting_all = (each for each in rule.smaller() if all(one.fits(each) for one in rules) and not world % each)
            yield rule.finding(layout, next(fitting_all, None), None)


# -- what is known of the model ---------------------------------------------------------------------------------------

# What names the model: options, and keys of verl and NeMo-RL.
_MODELS = {"model", "model_path", "model_name_or_path", "base_model", "hf_checkpoint", "policy.model_name"}
_MODELS |= {"actor_rollout_ref.model.path", "model.path"}


def _count(layout: Layout, check: _Check) -> tuple[Option, str] | None:
    """Return the option that states a count of the model, and the model in words; None if the count is unknown.

    It is unknown, too, where it is not a number, or parts of the model have different ones.
    """
    found = [option for option in layout.stated if option.name in check.names]
    if found:
        numbers = {str(option.first) for option in found}
        stated = len(numbers) == 1 and re.fullmatch(r"[1-9]\d{0,8}", numbers.pop())
        return (found[0].single, "") if stated else None
    option, counts_known = _model(layout)
    known = counts_known.get(check.count)
    return None if known is None else (Option((check.names[-1],), str(known), option.line), f" of {option.value}")


def _model(layout: Layout) -> tuple[Option, dict[str, int]]:
    """Return the model's option and counts: of its folder, its name, else of the folder of the file."""
    keys = [(option.key.lstrip("-").replace("-", "_"), option) for option in layout.stated]
    named = [option for key, option in keys if key in _MODELS and isinstance(option.first, str)]
    folder = Path(layout.path).parent
    if not named:
        return Option((), "config.json", 0), _counts_of(folder)
    option = named[0].single
    return option, _counts_of(folder / option.value) or _downloaded(option.value) or named_counts(option.value)


def _downloaded(name: str) -> dict[str, int]:
    """Return the counts of a model in Hugging Face's cache; empty if it is not there."""
    hub = os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME", "~/.cache/huggingface"), "hub")
    known = re.fullmatch(r"[\w.-]+/[\w.-]+", name)
    folder = Path(hub, f"models--{name.replace('/', '--')}", "snapshots").expanduser()
    snapshots = sorted(folder.glob("*")) if known else []
    return next((found for each in snapshots if (found := _counts_of(each))), {})


def _counts_of(folder: Path) -> dict[str, int]:
    """Return the counts of the model in a folder, none where it has no ``config.json`` of one."""
    try:
        data = parse_json(read_text(folder / "config.json", LARGEST))
    except Unreadable:
        return {}
    return counts(data) if isinstance(data, dict) and {"model_type", "architectures"} & data.keys() else {}
