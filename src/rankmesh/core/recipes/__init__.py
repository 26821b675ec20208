"""Recipes: the layouts of the field's systems as plans.

>>> from rankmesh.core import recipes
>>> recipes.megatron(world_size=64, tp=2, cp=2, pp=2, ep=4, etp=1)
Plan(Mesh(tp=2, cp=2, dp=8, pp=2).with_view('expert', etp=1, ep=4, edp=8, pp=2), 20 kinds: dp_cp intra_dp_cp dp cp \
mp tp pp embd pos_embd tp_dp_cp tp_dp tp_cp ep ep_tp tp_ep_mp tp_ep_pp ep_dp intra_ep_dp inter_ep_dp \
intra_dist_opt_instance)
"""

from typing import TYPE_CHECKING

from rankmesh.core.lazy import loader

if TYPE_CHECKING:
    from rankmesh.core.recipes.frameworks import accelerate, axes, deepspeed, ezpz, nanotron, three_d, torchtitan
    from rankmesh.core.recipes.megatron_core import megatron, megatron_mesh
    from rankmesh.core.recipes.serving import sglang, vllm

__all__ = ["accelerate", "axes", "deepspeed", "ezpz", "megatron", "megatron_mesh", "nanotron", "sglang", "three_d",
           "torchtitan", "vllm"]  # fmt: skip

_ELSEWHERE = {"megatron": "megatron_core", "megatron_mesh": "megatron_core", "sglang": "serving", "vllm": "serving"}

__getattr__, __dir__ = loader(__name__, {name: _ELSEWHERE.get(name, "frameworks") for name in __all__})
