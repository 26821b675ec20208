"""Sides of frameworks: how transformers, Megatron-Core, vLLM and SGLang shard every weight of a model.

```
transformers, megatron, vllm, sglang      the sides, which rankmesh finds as entry points of the group rankmesh.sides
engines                                   what vLLM and SGLang have in common
stand_ins                                 modules for packages of kernels that are not installed
```
"""
