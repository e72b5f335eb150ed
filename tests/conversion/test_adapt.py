"""The training without labels that follows a conversion. What it does to real models is tested in tests/engine."""
import copy

import pytest
import torch
from torch import nn

from mmunorm import UN
from mmunorm.conversion import adapt_batches


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
    before, after = adapt_batches(student, teacher, batches, lambda x: x, relative_error, steps)
    with torch.no_grad():
        measured = torch.stack([relative_error(student(x), teacher(x)) for x in batches[:8]]).mean().item()
    return before, after, measured


def test_a_rate_that_breaks_the_model_is_lowered():
    before, after, measured = adapted(200)
    assert after < before / 2
    assert measured == pytest.approx(after)


class Normed(nn.Module):

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(16, 16), UN(16), nn.Linear(16, 16)

    def forward(self, x):
        return (self.last(self.norm(self.first(x))), )


def pair():
    """A teacher, and a student that differs in all weights."""
    teacher, student = Normed().eval(), Normed()
    with torch.no_grad():
        for weight in student.parameters():
            weight += 0.1 * torch.randn_like(weight)
    return student, teacher


def test_statistics_are_measured_anew_and_maps_stay():
    student, teacher = pair()
    batches = torch.randn(20, 32, 16) + 3
    _, after = adapt_batches(student, teacher, batches, lambda x: x, relative_error, 30)
    with torch.no_grad():
        read = student.first(batches).flatten(0, -2)
        student.eval()
        measured = torch.stack([relative_error(student(x), teacher(x)) for x in batches[:8]]).mean().item()
    torch.testing.assert_close(student.norm.running_var, read.square().mean(0))
    assert measured == pytest.approx(after, rel=1e-3)


def test_the_best_weights_stay_without_gradients_and_in_their_modes():
    """The loss makes the student a little worse with each step."""
    student, teacher = pair()
    student.last.eval()
    weights = copy.deepcopy(student.last.state_dict())

    def distance(outs, wanted):
        error = relative_error(outs, wanted)
        return -error if torch.is_grad_enabled() else 10 + error

    before, after = adapt_batches(student, teacher, torch.randn(20, 32, 16), lambda x: x, distance, 10)
    assert before == after
    assert all(torch.equal(value, weights[name]) for name, value in student.last.state_dict().items())
    assert all(weight.grad is None for weight in student.parameters())
    assert student.training and student.norm.training and not student.last.training


def test_training_goes_on_after_a_step_that_is_not_finite():
    student, teacher = pair()
    steps = []

    def distance(outs, wanted):
        error = relative_error(outs, wanted)
        if torch.is_grad_enabled():
            steps.append(error)
            return error * torch.nan if len(steps) == 2 else error
        return error

    before, after = adapt_batches(student, teacher, torch.randn(20, 32, 16), lambda x: x, distance, 20)
    assert len(steps) == 20 and after < before
    assert all(weight.isfinite().all() for weight in student.parameters())


@pytest.mark.parametrize('steps', [1, 10])
def test_few_steps_leave_no_worse_model(steps):
    before, after, measured = adapted(steps)
    assert measured == pytest.approx(after)
    assert after <= before
