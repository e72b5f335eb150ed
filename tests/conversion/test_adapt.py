"""The training without labels that follows a conversion. What it does to real models is tested in tests/engine."""
import copy

import pytest
import torch
from torch import nn

from mmunorm.conversion import adapt


class Steep(nn.Module):
    """Layers that each make their input larger, so that a small step of all weights changes the output much."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))

    def forward(self, x):
        for layer in self.layers:
            x = x + 10 * layer(x).relu()
        return (x, )


def relative_error(outs, wanted):
    return (outs[0] - wanted[0]).square().mean() / wanted[0].square().mean()


def adapted(steps):
    teacher = Steep().eval()
    student = copy.deepcopy(teacher)
    with torch.no_grad():
        for weight in student.parameters():
            weight += 1e-4 * torch.randn_like(weight)
    batches = torch.randn(20, 32, 16)
    before, after = adapt(student, teacher, batches, lambda x: x, relative_error, steps)
    with torch.no_grad():
        measured = torch.stack([relative_error(student(x), teacher(x)) for x in batches[:8]]).mean().item()
    return before, after, measured


def test_a_rate_that_breaks_the_model_is_lowered():
    before, after, measured = adapted(200)
    assert after < before / 2
    assert measured == pytest.approx(after)


@pytest.mark.parametrize('steps', [1, 10])
def test_few_steps_leave_no_worse_model(steps):
    before, after, measured = adapted(steps)
    assert measured == pytest.approx(after)
    assert after <= before
