"""A wire whose rounds start together, as NCCL's do, without a GPU: NCCL's communicator is replaced by one over gloo.

NCCL hangs where two members do not have the same messages for each other in one batch. Here each tells the other how
many there are, and of how many bytes.
"""

import torch

from rankmesh.transfer.live.exchange import PendingMessage
from rankmesh.transfer.live.stream import Message
from rankmesh.transfer.sync import direct


class Together(direct.NcclGroup):
    """NCCL's wire, whose buffers are in main memory."""

    def __init__(self, store, key, members, rank, timeout, device):
        direct.Communicator = _OverGloo
        super().__init__(store, key, members, rank, timeout, torch.device("cuda", 0))

    def staging(self, tensors):
        """Where the tensors are."""
        return torch.device("cpu")


class _OverGloo:
    def __init__(self, store, rank, size, *, name, limit, device):
        self._group = direct.GlooGroup(store, name, range(size), rank, limit, device)

    def start(self, calls):
        counts, given = {}, {}
        for tensor, peer, sending in calls:
            count = counts.setdefault((peer, sending), torch.zeros(2, dtype=torch.int64))
            count += torch.tensor([1, tensor.nbytes])
        works = []
        for peer, sending in sorted(counts):
            count = counts[peer, sending]
            given[peer, sending] = count.clone() if sending else torch.empty_like(count)
            works.append(self._started(given[peer, sending], peer, sending))
        works += [self._started(*call) for call in calls]
        return _Batch(works, counts, given)

    def _started(self, tensor, peer, sending):
        message = PendingMessage(Message(peer, (), tensor.nbytes, tensor.nbytes), tensor, None, sending)
        self._group.start([message])
        return message.work

    def close(self):
        self._group.close(failed=True)


class _Batch:
    def __init__(self, works, counts, given):
        self._works, self._counts, self._given = works, counts, given

    def wait(self, timeout):
        works, self._works = self._works, []
        for work in works:
            work.wait(timeout)
        for key, count in self._counts.items():
            assert torch.equal(self._given[key], count), f"{key}: a batch of {count}, and of {self._given[key]}"
