"""A decoder-only transformer on every axis: tensor, context, data, pipeline and expert parallelism.

```
layout              the process groups that everything below uses: the one place where they come from
peers               the same value from Megatron's, nanotron's and a hand-written class
collectives         four collectives, and their gradients
text                batches as a pure function of the step
weights             each weight is a box of one whole tensor
tensor_parallel     vocabulary, heads and hidden units over tp
context_parallel    the sequence over cp
experts             tokens to experts over ep
model               the blocks, and the stage of the pipeline that this rank holds
pipeline            1F1B over pp
optimizer           AdamW, sharded over the replicas of each weight
checkpoint          saved under one layout, resumed under another
loop                the steps
survive             the same in a job that loses ranks and goes on
```
"""
