"""The parameters of each family's model as transformers builds it: ``python -m tests.readers.families TRANSFORMERS``.

It writes ``families.json`` beside this file: for each family a small ``config.json``, once whole and once without what
its config class knows, and the number of parameters of the real model. TRANSFORMERS is a folder that has the package.
"""

import json
import sys
from pathlib import Path

from rankmesh.readers.models import FAMILIES

FILE = Path(__file__).with_name("families.json")
# What every published config states.
STATED = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size",
          "n_embd", "n_layer", "n_head")  # fmt: skip
SIZES = {"hidden_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 32, "intermediate_size": 4096,
         "vocab_size": 160000}  # fmt: skip
# GPT-2's configs have names of their own.
GPT2 = {"n_embd": 2048, "n_layer": 12, "n_head": 32, "vocab_size": 160000}
# What transformers leaves without a default.
OPEN = {"deepseek_v2": {"num_experts_per_tok": 6}}


def _real(kind, changes):
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(kind, **changes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return config.to_dict(), sum(parameter.numel() for parameter in model.parameters())


def main(folder):
    """Write the file."""
    sys.path.insert(0, folder)
    found = {}
    for kind in FAMILIES:
        changes = (GPT2 if kind == "gpt2" else SIZES) | OPEN.get(kind, {})
        config, parameters = _real("deepseek_v3" if kind == "kimi_k2" else kind, changes)
        stated = (*STATED, *OPEN.get(kind, ()))
        found[kind] = {"config": {name: config[name] for name in stated if name in config}, "parameters": parameters}
        found[kind]["config"]["model_type"] = kind
    FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
