"""Adapters: shardings from what others say of their tensors.

```
dtensors        DTensors: their mesh and placements, strided ones too                                    torch
megatron        Megatron's parameters: their own attributes, gathered over all ranks                     torch
huggingface     shapes, and a tensor-parallel plan as transformers states it                             no torch
vllm            the same model as vLLM lays it: fused, padded, by stage, heads copied, experts stacked   no torch
```

Each is a module of its own, loaded when it is asked for. What a tensor is called on both sides is the user's to say.
"""
