"""Models by name: their shapes by their published ``config.json``, without weights and without network.

Weights are those before quantisation, as they are trained. Of Gemma 3 these are the texts' layers.

>>> CONFIGS["llama3-8b"]["hidden_size"], CONFIGS["qwen3-30b-a3b"]["num_experts"]
(4096, 128)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from rankmesh.core.documents import parse_json
from rankmesh.readers.families import counts

__all__ = ["CONFIGS", "named_counts"]

# ``configs``: The Llama 3 Herd of Models (2024), table 3; Mixtral of Experts (2024), table 1; of the others as their
# authors published them. ``counts``: heads, heads of keys and layers of further models, by their names at Hugging Face.
_DATA: Mapping[str, Any] = parse_json(files(__package__).joinpath("models.json").read_text(encoding="utf-8"))
CONFIGS: Mapping[str, Mapping[str, object]] = _DATA["configs"]
_NAMES: Mapping[str, str] = {
    r"llama-3(\.1)?-8b": "llama3-8b",
    r"llama-3(\.[13])?-70b": "llama3-70b",
    r"llama-3\.1-405b": "llama3-405b",
    r"deepseek-(v3(\.1)?|r1)": "deepseek-v3",
    r"qwen3(-coder)?-30b-a3b": "qwen3-30b-a3b",
    r"gemma-3-(1b|27b)": r"gemma3-\1",
}
# What names another training or number format of the same shape.
_VARIANT = re.compile(
    r"(-(instruct|base|chat|it|pt|hf|fp8|nvfp4|fp4|awq|gptq|int[48]|bf16|w\da\d+|bnb|[48]bit|thinking|dynamic|quantized"
    r"|\d{4}|v0\.\d|zero|terminus)(\.w\da\d+)?)+$"
)


def named_counts(name: str) -> dict[str, int]:
    """Return the heads, heads of keys, layers and experts of a model by its name at Hugging Face, none of another.

    >>> named_counts("Qwen/Qwen2.5-7B-Instruct"), named_counts("org/Qwen2.5-7B-merged")
    ({'heads': 28, 'kv_heads': 4, 'layers': 28}, {})
    """
    model = _VARIANT.sub("", name.rpartition("/")[2].lower()).removeprefix("meta-")
    if model in _DATA["counts"]:
        return dict(zip(("heads", "kv_heads", "layers"), _DATA["counts"][model], strict=True))
    known = next((re.sub(pattern, to, model) for pattern, to in _NAMES.items() if re.fullmatch(pattern, model)), model)
    return counts(CONFIGS[known]) if known in CONFIGS else {}
