"""Layers whose weights are cut over the tensor-parallel group; each gives what torch's whole layer gives.

```
                        weight (rows x columns)          cut along    output
VocabParallelEmbedding  num_embeddings x embedding_dim   rows         whole: summed over the group
ParallelEmbedding       num_embeddings x embedding_dim   columns      whole: gathered
ColumnParallelLinear    out_features x in_features       rows         gathered, or own columns of it
RowParallelLinear       out_features x in_features       columns      whole: summed over the group
```

``stride`` cuts several matrices that lie side by side each for itself. ``state`` is the state whose tensor-parallel
group is meant, None for the module-level one.

What differs from ezpz's layers: padding indices, ``max_norm`` and ``scale_grad_by_freq`` act as in
``torch.nn.Embedding`` or are refused (ezpz passes them on to a table that holds other rows); an index outside the
vocabulary is an ``IndexError``, as torch has it, not a row of zeros; ``get_master_weight`` undoes ``stride`` too; a
layer that was built for another size than the group has now is refused where it is used.
"""

from __future__ import annotations

from rankmesh.dialects.ezpz.embeddings import ParallelEmbedding, VocabParallelEmbedding
from rankmesh.dialects.ezpz.linears import ColumnParallelLinear, RowParallelLinear

__all__ = ["ColumnParallelLinear", "ParallelEmbedding", "RowParallelLinear", "VocabParallelEmbedding"]
