"""What a program trains, by the framework's names, and how its steps are counted."""

import torch

from rankmesh.guard.observe import Program, Steps


class Wrapper(torch.nn.Module):
    """Like torch's DistributedDataParallel."""

    def __init__(self, module):
        super().__init__()
        self.module = module


def test_names_and_states():
    """A wrapper has no part in names; a parameter of no module has a place; scalars and freed memory are left out."""
    program = Program()
    model = Wrapper(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1, bias=False)))
    single = torch.zeros(5, requires_grad=True)
    optimizer = torch.optim.Adam([*model.parameters(), single])
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    program.number(optimizer)
    model.module[0].bias.data.untyped_storage().resize_(0)
    names = {"0.weight", "1.weight", "optimizer 0 parameter 3"}
    tensors, owners = program.tensors()
    ours = {name for name in tensors if tensors[name].shape in ((2, 3), (1, 2), (5,))}
    assert ours >= names | {f"{name}.{state}" for name in names for state in ("exp_avg", "exp_avg_sq")}
    assert owners["0.weight.exp_avg"] == "0.weight"
    assert "0.bias" not in tensors
    assert not any(name.endswith(".step") for name in tensors)


def test_steps_of_the_first_optimizer_count():
    """Not those of others, until it has made none for eight of them."""
    steps = Steps()
    assert [steps.begin(which) for which in "abab"] == [True, False, True, False]
    assert steps.done == 1
    assert [steps.begin("b") for _ in range(9)] == [False] * 7 + [True] * 2
    assert steps.done == 3
