"""A process group of a simulation, as ``torch.distributed`` calls it: each method posts one call, and returns its work.

```
torch.distributed.all_reduce(x, group=pg)         Python ── pg.allreduce([x], options)
torch.ops._c10d_functional.all_reduce(x, ...)     C++ ───── the same method, through torch's PyProcessGroup
```

The names of the methods are those by which torch calls a process group that is written in Python, private and former
ones too: they are known on the releases of ``backend.versions``.
"""

# torch's stubs lack these private parts, and type each method by its overloads; here one method serves them all.
# mypy: disable-error-code="attr-defined,assignment,override"

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
import torch.distributed as dist

from rankmesh.backend import torch_threads
from rankmesh.backend.python_group import PythonGroup
from rankmesh.backend.single_rank import Listed, as_list, flat_list
from rankmesh.sim.calls import Call, call_site, shapes
from rankmesh.sim.compute import reduction_name
from rankmesh.sim.works import SimulatedWork, Together

if TYPE_CHECKING:
    from rankmesh.sim.channel import Channel, PendingOperation
    from rankmesh.sim.simulation import Simulation

__all__ = ["SimulatedGroup"]

Tensor = torch.Tensor
Tensors = list[Tensor]
Nested = Sequence[Listed]
Rows = Sequence[int] | None


class Options(Protocol):
    """The fields of torch's option objects that a simulated call reads; each kind of call has its own class."""

    rootRank: int  # noqa: N815  - torch's name
    reduceOp: object  # noqa: N815  - torch's name


Opts = Options | None


class SimulatedGroup(PythonGroup):
    """One rank's process group; the calls of all ranks' groups of one name and members go to one channel."""

    def __init__(self, simulation: Simulation, channel: Channel, position: int) -> None:
        super().__init__(position, len(channel.ranks))
        self.simulation, self.channel, self.position = simulation, channel, position
        self.owner = channel.ranks[position]
        self.destroyed = False
        self._posted = 0
        self._together: list[SimulatedWork] | None = None

    # -- collectives --------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Listed, opts: Opts = None, *_: object) -> dist.Work:
        return self._reducing("all_reduce", as_list(tensors), as_list(tensors), opts)

    def allreduce_coalesced(self, tensors: Listed, opts: Opts = None, *_: object) -> dist.Work:
        return self._reducing("all_reduce_coalesced", as_list(tensors), as_list(tensors), opts)

    def reduce(self, tensors: Listed, opts: Options, *_: object) -> dist.Work:
        given = as_list(tensors)
        return self._reducing("reduce", given, given if opts.rootRank == self.position else [], opts, opts.rootRank)

    def broadcast(self, tensors: Listed, opts: Opts = None, *_: object) -> dist.Work:
        given, root = as_list(tensors), 0 if opts is None else opts.rootRank
        signature = {"tensors": shapes(given), "root": self._name_of(root)}
        return self._post("broadcast", given, given, opts, signature, root=root)

    def allgather(self, outputs: Nested, inputs: Listed, opts: Opts = None, *_: object) -> dist.Work:
        """Give every member the tensors of all, in the order of positions; shapes may differ."""
        return self._gathering("all_gather", flat_list(outputs), as_list(inputs), opts)

    def allgather_coalesced(self, outputs: Nested, inputs: Listed, opts: Opts = None, *_: object) -> dist.Work:
        """Gather several at once: the outputs are listed by member."""
        return self._gathering("all_gather_coalesced", flat_list(outputs), as_list(inputs), opts)

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Opts = None, *_: object) -> dist.Work:
        return self._gathering_parts("all_gather_single", [output], [given], opts)

    def all_gather_single_coalesced(self, outputs: Listed, inputs: Listed, opts: Opts = None, *_: object) -> dist.Work:
        return self._gathering_parts("all_gather_single_coalesced", as_list(outputs), as_list(inputs), opts)

    def gather(self, outputs: Nested, inputs: Listed, opts: Options, *_: object) -> dist.Work:
        given, signature = as_list(inputs), {"root": self._name_of(opts.rootRank)}
        local = {"gives": shapes(given)}
        return self._post("gather", given, flat_list(outputs), opts, signature, local, root=opts.rootRank)

    def scatter(self, outputs: Listed, inputs: Nested, opts: Options, *_: object) -> dist.Work:
        takes, signature = as_list(outputs), {"root": self._name_of(opts.rootRank)}
        local = {"takes": shapes(takes)}
        return self._post("scatter", flat_list(inputs), takes, opts, signature, local, root=opts.rootRank)

    def reduce_scatter(self, outputs: Listed, inputs: Nested, opts: Opts = None, *_: object) -> dist.Work:
        given, takes = flat_list(inputs), as_list(outputs)
        self._expect("reduce_scatter", len(given), self.size(), "tensors, one for each member")
        self._expect("reduce_scatter", takes[0].numel(), given[self.position].numel(), "elements of output")
        return self._reducing("reduce_scatter", given, takes, opts)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Opts = None, *_: object) -> dist.Work:
        return self._scattering_parts("reduce_scatter_single", [output], [given], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Listed, inputs: Listed, opts: Opts = None, *_: object
    ) -> dist.Work:
        return self._scattering_parts("reduce_scatter_single_coalesced", as_list(outputs), as_list(inputs), opts)

    def alltoall(self, outputs: Listed, inputs: Listed, opts: Opts = None, *_: object) -> dist.Work:
        given, takes = as_list(inputs), as_list(outputs)
        self._expect("all_to_all", len(given), self.size(), "tensors, one for each member")
        self._expect("all_to_all", len(takes), self.size(), "outputs, one for each member")
        local = {"gives": shapes(given), "takes": shapes(takes)}
        return self._post("all_to_all", given, takes, opts, {}, local)

    def all_to_all_single(
        self, output: Tensor, given: Tensor, takes: Rows = None, gives: Rows = None, opts: Opts = None, *_: object
    ) -> dist.Work:
        """Exchange rows between all members: equally many, or by the split sizes."""
        gives, takes = self._rows(given, gives), self._rows(output, takes)
        parts, places = list(torch.split(given, gives)), list(torch.split(output, takes))
        signature, local = {"rows": shapes([given[:0]])}, {"gives": tuple(gives), "takes": tuple(takes)}
        return self._post("all_to_all_single", parts, places, opts, signature, local)

    def barrier(self, opts: Opts = None, *_: object) -> dist.Work:
        return self._post("barrier", [], [], opts)

    def monitored_barrier(self, timeout: object = None, wait_all_ranks: bool = False) -> None:
        """Wait for all members; an error names those that do not join."""
        self._post("monitored_barrier", [], [], None).wait()

    def meet(self) -> None:
        """Wait until all members have made the group, as gloo connects them."""
        self._post("new_group", [], [], None).wait()

    def split_group(self, *_: object, **__: object) -> NoReturn:
        """Raise, where torch would crash: a simulation has no communicator to split."""
        raise NotImplementedError(
            f"a simulation does not carry split_group on {self.channel}; use torch.distributed.new_group, or a kind of "
            "group of the plan"
        )

    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # -- point to point -----------------------------------------------------------------------------------------

    def send(self, tensors: Listed, peer: int, tag: int = 0) -> dist.Work:
        """Send to the member at position ``peer``; the work is done when that member has received it."""
        return self._point_to_point("send", as_list(tensors), [], peer, tag)

    def recv(self, tensors: Listed, peer: int, tag: int = 0) -> dist.Work:
        return self._point_to_point("recv", [], as_list(tensors), peer, tag)

    def recv_anysource(self, tensors: Listed, tag: int = 0) -> dist.Work:
        return self._point_to_point("recv", [], as_list(tensors), None, tag)

    # -- what torch asks besides --------------------------------------------------------------------------------

    def start_together(self) -> None:
        """Begin to collect calls: those until ``end_together`` have one work."""
        self._together = []

    def end_together(self) -> dist.Work:
        """Return the work of all calls since ``start_together``."""
        works, self._together = self._together or [], None
        return Together(works)

    def set_timeout(self, timeout: object) -> None:
        """Do nothing: a rank that cannot go on fails immediately."""

    def shutdown(self) -> None:
        """Raise an error for every further call."""
        self.destroyed = True

    abort = shutdown

    def getBackendName(self) -> str:  # noqa: N802  - torch's name
        return "simulated"

    @property
    def calls_made(self) -> int:
        """The number of calls that this rank has made on the group."""
        return self._posted

    def __repr__(self) -> str:
        return f"SimulatedGroup({self.channel}, position {self.position})"

    # -- the ways to post ---------------------------------------------------------------------------------------

    def _reducing(
        self,
        name: str,
        given: Tensors,
        takes: Tensors,
        opts: Opts,
        root: int | None = None,
        shown: Tensors | None = None,
    ) -> dist.Work:
        reduction = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        signature: dict[str, object] = {"tensors": shapes(shown or given), "reduction": reduction_name(reduction)}
        if root is not None:
            signature["root"] = self._name_of(root)
        return self._post(name, given, takes, opts, signature, reduction=reduction, root=root)

    def _gathering(self, name: str, takes: Tensors, given: Tensors, opts: Opts) -> dist.Work:
        local = {"gives": shapes(given), "takes": shapes(takes)}
        return self._post(name, given, takes, opts, {"tensors": len(given)}, local)

    def _gathering_parts(self, name: str, takes: Tensors, given: Tensors, opts: Opts) -> dist.Work:
        return self._post(name, given, self._by_member(name, takes, given), opts, {"tensors": shapes(given)})

    def _scattering_parts(self, name: str, takes: Tensors, given: Tensors, opts: Opts) -> dist.Work:
        return self._reducing(name, self._by_member(name, given, takes), takes, opts, shown=given)

    def _by_member(self, name: str, large: Tensors, small: Tensors) -> Tensors:
        """Return the parts of large tensors, each of the size of a small one; the first member's parts first."""
        parts = []
        for whole, part in zip(large, small, strict=True):
            self._expect(name, whole.numel(), part.numel() * self.size(), "elements in the larger tensor")
            rows = whole if whole.dim() and whole.shape[0] % self.size() == 0 else whole.view(-1)
            parts.append(rows.chunk(self.size()))
        return [part for member in zip(*parts, strict=True) for part in member]

    def _post(self, *given: Any, **options: Any) -> SimulatedWork:
        """Make a collective call: see ``_call``."""
        return self._work(self.simulation.join(self, self._call(*given, **options)))

    def _point_to_point(self, operation: str, given: Tensors, takes: Tensors, peer: int | None, tag: int) -> dist.Work:
        whom = "anybody" if peer is None else self._name_of(peer)
        signature = {"to" if operation == "send" else "from": whom, "tensor": shapes(given or takes), "tag": tag}
        call = self._call(operation, given, takes, None, signature)
        return self._work(self.simulation.post(self, call, peer, tag))

    def _call(
        self,
        operation: str,
        given: Tensors,
        takes: Tensors,
        opts: Opts,
        signature: Mapping[str, object] = MappingProxyType({}),
        local: Mapping[str, object] = MappingProxyType({}),
        *,
        reduction: object = None,
        root: int | None = None,
    ) -> Call:
        for tensor in (*given, *takes):
            _check_dense(tensor, operation)
        self._posted += 1
        return Call(
            rank=self.owner,
            position=self.position,
            operation=operation,
            inputs=given,
            outputs=takes,
            site=call_site(),
            signature=signature,
            local=local,
            reduction=reduction,
            root=root,
            given=[tensor.detach().clone() for tensor in given],
            versions=[torch_threads.version(tensor) for tensor in given] if getattr(opts, "asyncOp", True) else [],
        )

    def _work(self, pending: PendingOperation) -> SimulatedWork:
        work = SimulatedWork(self.simulation.scheduler, pending)
        if self._together is not None:
            self._together.append(work)
        return work

    def _name_of(self, position: int) -> str:
        if not 0 <= position < self.size():
            raise ValueError(
                f"position {position} is nobody on {self.channel}, with positions 0 to {self.size() - 1}; give one "
                "of these as root or peer (gloo crashes here)"
            )
        return f"rank {self.channel.ranks[position]}"

    def _rows(self, tensor: torch.Tensor, sizes: Rows) -> list[int]:
        if sizes:
            self._expect("all_to_all_single", len(sizes), self.size(), "split sizes, one for each member")
            self._expect("all_to_all_single", sum(sizes), tensor.shape[0], "rows in the split sizes")
            return list(sizes)
        self._expect("all_to_all_single", tensor.shape[0] % self.size(), 0, "rows left over")
        return [tensor.shape[0] // self.size()] * self.size()

    def _expect(self, operation: str, got: int, expected: int, what: str) -> None:
        if got != expected:
            raise ValueError(
                f"{operation} on {self.channel} has {got} {what}, and needs {expected}; give tensors that fit"
            )


def _check_dense(tensor: torch.Tensor, operation: str) -> None:
    """Raise if a tensor has gaps: real backends move one block of memory, with what lies between the elements."""
    if tensor.layout != torch.strided:
        raise ValueError(f"{operation} cannot move a tensor of layout {tensor.layout}; make it dense first")
    extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    if tensor.numel() and extent != tensor.numel():
        raise ValueError(
            f"{operation} moves one block of memory, and a tensor of shape {list(tensor.shape)} and strides "
            f"{list(tensor.stride())} is none (gloo gives wrong numbers without a word); give tensor.contiguous()"
        )
