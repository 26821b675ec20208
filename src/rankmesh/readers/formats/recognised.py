"""The format of options: the one whose keys a document has, or whose program a command starts.

The error for a system whose sizes are not read names the system.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from rankmesh.errors import PlanError, cut
from rankmesh.readers.formats.accelerate import ACCELERATE
from rankmesh.readers.formats.deepspeed import DEEPSPEED, FACTORY
from rankmesh.readers.formats.engines import SGLANG, VLLM
from rankmesh.readers.formats.megatron import MEGATRON
from rankmesh.readers.formats.torchtitan import TORCHTITAN
from rankmesh.readers.formats.trainers import AXOLOTL, GPT_NEOX, NANOTRON, NEMO_RL, PICOTRON
from rankmesh.readers.formats.verl import VERL
from rankmesh.readers.launches import system
from rankmesh.readers.options import NO_LAYOUT, Options, place
from rankmesh.readers.table import Format

__all__ = ["FORMATS", "KNOWN", "recognised"]

KNOWN = (
    "a config is a launch script of Megatron, torchtitan, verl, DeepSpeed, vLLM or SGLang, a file or YAML of "
    "Megatron's arguments, a GPT-NeoX, NeMo-RL, verl, axolotl or nanotron YAML, a torchtitan TOML, a DeepSpeed or "
    "picotron JSON, or an Accelerate YAML"
)
# A command is of the first format that matches; Megatron matches every command, and counts last.
FORMATS: Mapping[str, Format] = {
    "megatron": MEGATRON,
    "gpt_neox": GPT_NEOX,
    "nemo_rl": NEMO_RL,
    "verl": VERL,
    "axolotl": AXOLOTL,
    "nanotron": NANOTRON,
    "picotron": PICOTRON,
    "torchtitan": TORCHTITAN,
    "vllm": VLLM,
    "sglang": SGLANG,
    "llamafactory": FACTORY,
    "deepspeed": DEEPSPEED,
    "accelerate": ACCELERATE,
}
# A document of the first has keys of the second beside its own.
_BESIDE = (("gpt_neox", "deepspeed"), ("nemo_rl", "megatron"), ("verl", "megatron"))
# Systems that are not read: patterns of their commands, in addition to ``system``; keys of their documents.
_PROGRAMS = {
    "OpenRLHF": r"\sopenrlhf\.cli\.|/openrlhf/",
    "AReaL": r"[\s/]areal/|\sallocation_mode=",
    "NeMo Automodel": r"\snemo_automodel[./]",
}
_KEYS: Mapping[str, tuple[set[str], ...]] = {
    "NeMo Automodel": ({"distributed.strategy", "distributed.tp_size"},),
    "AReaL": ({"allocation_mode"},),
    "OpenRLHF": ({"ds.tensor_parallel_size"}, {"actor.num_gpus_per_node"}),
}


def recognised(options: Options) -> str:
    """Return the name of the format. Raises ``PlanError`` where there is none, or several."""
    path, words = options.path, f" {' '.join(options.words)} "
    known = system(options.command) or next((name for name, how in _PROGRAMS.items() if re.search(how, words)), "")
    if known and known not in FORMATS:
        raise _unsupported(known, place(path, options.command.line), path)
    names = [name for name, form in FORMATS.items() if form.matches(options)]
    if options.is_command:
        return [*names[1:], names[0]][0]
    names = [one for one in names if not any(one == other and name in names for name, other in _BESIDE)]
    if len(names) == 1:
        return names[0]
    top = {option.key: option for option in options.flags if len(option.path) == 1}
    if not names:
        keys = {option.key for option in options.flags}
        if other := next((name for name, marks in _KEYS.items() if any(mark <= keys for mark in marks)), ""):
            raise _unsupported(other, path, path)
        if top.keys() >= {"apiVersion", "kind"}:
            kind = cut(str(top["kind"].value))
            problem = f"this is a manifest of kind {kind}; rankmesh lint {path} checks the commands of manifests"
            raise PlanError(f"{path}: {problem}", path=path, code=NO_LAYOUT)
    found = f"keys of {' and of '.join(names)}" if names else "no key of a training config"
    raise PlanError(
        f"{path}: this file has {found}; {KNOWN}; give one of them",
        path=path,
        formats=tuple(names),
        code=None if names else NO_LAYOUT,
    )


def _unsupported(name: str, where: str, path: str) -> PlanError:
    layout = "give the layout as a SPEC, such as rankmesh show tp=2,dp=4"
    return PlanError(f"{where}: this is a run of {name}, whose sizes are not read; {layout}", path=path, system=name)
