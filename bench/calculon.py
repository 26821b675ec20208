"""Published runs of GPT models as Calculon predicts them: ``python -m bench.calculon DIR``.

``DIR`` is a checkout of github.com/calculon-ai/calculon (Isaev et al. 2023), which needs pandas and psutil. The ratios
go into bench/published.json. Calculon takes its own file of the A100, and the microbatch, virtual stages and
recomputation that rankmesh chose where a source leaves them open. It has neither vocabulary nor loss, grouped queries,
gated layers, experts, or FP8.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.published import FIGURES, ROWS
from rankmesh.cli.console import note

__all__ = ["main"]

_RECOMPUTE = {"none": "none", "selective": "attn_only", "full": "full"}


def _application(row: Mapping[str, Any]) -> dict[str, int]:
    model = row["model"]
    return {
        "hidden": model["hidden"],
        "feedforward": model["ffn_hidden_size"],
        "seq_size": row["training"]["sequence"],
        "attn_heads": model["heads"],
        "attn_size": model["hidden"] // model["heads"],
        "num_blocks": model["layers"],
    }


def _execution(row: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    training, sizes = {**row["training"], **chosen}, {"tp": 1, "pp": 1, "dp": 1, **row["sizes"]}
    parallel = training.get("sequence_parallel", True)
    off = ("fused_activation", "weight_offload", "activations_offload", "optimizer_offload")
    return dict.fromkeys(off, False) | {
        "num_procs": sizes["tp"] * sizes["pp"] * sizes["dp"],
        "tensor_par": sizes["tp"],
        "pipeline_par": sizes["pp"],
        "data_par": sizes["dp"],
        "tensor_par_net": 0,
        "pipeline_par_net": 1,
        "data_par_net": 1,
        "batch_size": training["batch"],
        "microbatch_size": training.get("microbatch", 1),
        "datatype": "float16",
        "attention_type": "multihead",
        "activation_recompute": _RECOMPUTE[training.get("recompute", "none")],
        "pipeline_interleaving": training.get("virtual_stages", 1),
        "optimizer_sharding": training.get("zero", 1) > 0,
        "tensor_par_comm_type": "rs_ag" if parallel else "ar",
        "tensor_par_overlap": "none",
        "seq_par_ag_redo": parallel,
        "data_par_overlap": sizes["dp"] > 1,
        "training": True,
    }


def main() -> None:
    """Predict each row of an A100 and write what it is of the published step; None where it refuses the row."""
    folder = Path(sys.argv[1])
    sys.path.insert(0, str(folder))
    from calculon.llm.llm import Llm  # type: ignore[import-not-found]
    from calculon.system import System  # type: ignore[import-not-found]

    system = System(json.loads((folder / "systems" / "a100_80g.json").read_text(encoding="utf-8")))
    figures = json.loads(FIGURES.read_text(encoding="utf-8"))
    rows = {row["name"]: row for row in json.loads(ROWS.read_text(encoding="utf-8"))["rows"]}
    for known in figures["rows"]:
        row = rows[known["name"]]
        if row["device"] != "a100":
            continue
        model = Llm(Llm.Application(_application(row)), logging.getLogger("calculon"))
        try:
            model.compile(system, Llm.Execution.from_json(_execution(row, known["chosen"])))
            model.run(system)
        except Llm.Error as error:
            note(f"{known['name']}: {error}")
            known["calculon"] = None
            continue
        known["calculon"] = model.get_stats_json(False)["total_time"] / known["published"]
        note(f"{known['name']:42} {known['calculon']:.2f}")
    FIGURES.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
