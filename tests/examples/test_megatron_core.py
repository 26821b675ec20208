"""megatron-core's own ``parallel_state`` drives the same training."""

import warnings

import pytest
from tests.examples.training import train_in_words

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("megatron.core.parallel_state")


def _train(me, *cases):
    """The same here, so that what forks the ranks loads megatron-core with this module, once."""
    return train_in_words(me, *cases)


@pytest.mark.long
def test_megatron_core_itself(ranks):
    """4 ranks: over its groups, and over the drop-in's, the losses and norms are those over rankmesh's."""
    for layout in ("pp=2,dp=2,ep=2", "tp=2,cp=2"):
        arguments = [(name, layout) for name in ("rankmesh", "megatron", "megatron-core")]
        for ours, *theirs in ranks(4, _train, *arguments, timeout=60.0):
            assert theirs == [ours, ours]
