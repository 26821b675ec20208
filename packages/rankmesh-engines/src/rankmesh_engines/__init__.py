"""Sides of frameworks: how transformers, Megatron-Core, vLLM and SGLang shard every weight of a model.

```
transformers, megatron, vllm, sglang      the sides, which rankmesh finds as entry points of the group rankmesh.sides
loaders                                   a loader run as every rank in turn, and the layout that this gives
trace                                     a loader run on tensors without storage: where each element came from
strided                                   copies between memories, as strides: without torch
inference                                 the boxes of all ranks as one sharding, or why there is none: without torch
engines                                   what vLLM and SGLang have in common
stand_ins                                 modules for packages of kernels that are not installed
```
"""
