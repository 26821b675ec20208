"""Adapters: shardings from what others state about their tensors.

```
dtensors        DTensors: their mesh and placements, strided ones too                                    torch
megatron        Megatron's parameters: their own attributes, gathered over all ranks                     torch
huggingface     shapes, and a tensor-parallel plan as transformers states it                             no torch
vllm            the same model as vLLM shards it: fused, padded, by stage, heads copied, experts stacked   no torch
```

Each is a module of its own, loaded when it is asked for. The user maps the names of one side to those of the other.
"""
