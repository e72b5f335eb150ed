from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from mmunorm.utils import PreflightError
from projects.paper.paper import InputStressHook


class Preprocessor(nn.Module):

    def forward(self, data, training=False):
        return data


def begin(hook, start=0):
    runner = SimpleNamespace(model=nn.Module(), iter=start)
    runner.model.data_preprocessor = Preprocessor()
    hook.before_train(runner)
    return runner


def factors_of(hook, steps, start=0):
    """The inputs of the model for inputs of ones, by step."""
    runner = begin(hook, start)
    inputs = []
    for runner.iter in range(start, start + steps):
        hook.before_train_iter(runner, 0)
        data = runner.model.data_preprocessor(dict(inputs=torch.ones(2), data_samples='samples'), True)
        assert data['data_samples'] == 'samples'
        inputs.append(data['inputs'][0].item())
        hook.after_train_iter(runner, 0)
        # A validation between two steps is not disturbed.
        assert runner.model.data_preprocessor(dict(inputs=torch.ones(2)), False)['inputs'][0] == 1
    hook.after_train(runner)
    return np.array(inputs)


def test_share_range_and_law():
    factors = factors_of(InputStressHook(probability=0.25, scale=(2, 50)), 4000)
    disturbed = factors[factors != 1]
    assert 900 < len(disturbed) < 1100
    assert 2 <= disturbed.min() < 2.1 and 48 < disturbed.max() <= 50
    # Log-uniform: as many below the geometric middle as above.
    assert 0.45 < (disturbed < 10).mean() < 0.55


def test_the_same_steps_for_all_and_after_resuming():
    whole = factors_of(InputStressHook(probability=0.3, seed=1), 60)
    assert np.array_equal(whole[40:], factors_of(InputStressHook(probability=0.3, seed=1), 20, start=40))
    assert not np.array_equal(whole, factors_of(InputStressHook(probability=0.3, seed=2), 60))


@pytest.mark.parametrize(('arguments', 'text'), [
    (dict(probability=2), r'probability must be in \[0, 1\], got 2'), (dict(scale=(3, 2)), 'least'),
    (dict(scale=(0, 2)), '0 < least'), (dict(seed=-1), 'seed')])
def test_wrong_arguments(arguments, text):
    with pytest.raises(ValueError, match=text):
        InputStressHook(**arguments)


def test_other_inputs_are_refused_in_the_first_step():
    """Not in the first step that is disturbed."""
    hook = InputStressHook(probability=0)
    runner = begin(hook)
    hook.before_train_iter(runner, 0)
    with pytest.raises(PreflightError, match='a batch of normalized images, and the inputs that Preprocessor '):
        runner.model.data_preprocessor(dict(source=torch.ones(2, dtype=torch.long)), True)
