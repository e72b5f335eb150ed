from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from mmunorm.engine import InputStressHook
from mmunorm.utils import PreflightError

from .. import tiny_runs


class Preprocessor(nn.Module):

    def forward(self, data, training=False):
        return dict(inputs=data['inputs'].float(), data_samples='samples')


def seen(hook, steps, start=0):
    """What the model sees of inputs of one, step by step."""
    runner = SimpleNamespace(model=nn.Module(), iter=start)
    runner.model.data_preprocessor = Preprocessor()
    hook.before_train(runner)
    inputs = []
    for runner.iter in range(start, start + steps):
        hook.before_train_iter(runner, 0)
        data = runner.model.data_preprocessor(dict(inputs=torch.ones(2)), True)
        assert data['data_samples'] == 'samples'
        inputs.append(data['inputs'][0].item())
        hook.after_train_iter(runner, 0)
        # A validation between two steps is left alone.
        assert runner.model.data_preprocessor(dict(inputs=torch.ones(2)), False)['inputs'][0] == 1
    hook.after_train(runner)
    return np.array(inputs)


def test_share_range_and_law():
    factors = seen(InputStressHook(probability=0.25, scale=(2, 50)), 4000)
    disturbed = factors[factors != 1]
    assert 900 < len(disturbed) < 1100
    assert 2 <= disturbed.min() < 2.1 and 48 < disturbed.max() <= 50
    # Log-uniform: as many below the geometric middle as above.
    assert 0.45 < (disturbed < 10).mean() < 0.55


def test_the_same_steps_for_all_and_after_resuming():
    whole = seen(InputStressHook(probability=0.3, seed=1), 60)
    assert np.array_equal(whole[40:], seen(InputStressHook(probability=0.3, seed=1), 20, start=40))
    assert not np.array_equal(whole, seen(InputStressHook(probability=0.3, seed=2), 60))


def test_none_and_all():
    assert (seen(InputStressHook(probability=0), 50) == 1).all()
    assert (seen(InputStressHook(probability=1), 50) != 1).all()


@pytest.mark.parametrize(('arguments', 'text'), [
    (dict(probability=2), r'probability must be in \[0, 1\], got 2'), (dict(scale=(3, 2)), 'least'),
    (dict(scale=(0, 2)), '0 < least'), (dict(seed=-1), 'seed')])
def test_wrong_arguments(arguments, text):
    with pytest.raises(ValueError, match=text):
        InputStressHook(**arguments)


@pytest.mark.parametrize('output', [dict(source=torch.ones(2, dtype=torch.long)), dict(inputs=[torch.ones(3, 4, 4)])])
def test_what_is_no_batch_of_pictures_is_refused_in_the_first_step(output):
    """Token ids, and a list of pictures in [0, 1]; not in the first step that is disturbed."""
    class Translating(nn.Module):

        def forward(self, data, training=False):
            return output

    hook = InputStressHook(probability=0)
    runner = SimpleNamespace(model=nn.Module(), iter=0)
    runner.model.data_preprocessor = Translating()
    hook.before_train(runner)
    hook.before_train_iter(runner, 0)
    with pytest.raises(PreflightError, match='a batch of normalized pictures, and the inputs that Translating returns'):
        runner.model.data_preprocessor({}, True)


@pytest.mark.slow
def test_a_real_run(tmp_path, monkeypatch):
    """Without biases, a factor of 4 is one of 16 in the first norm's statistic of the first step."""
    tiny_runs.skip_config_formatting(monkeypatch)
    train, config = tiny_runs.load_tool('train'), tiny_runs.write_classifier(tmp_path)
    config.write_text(config.read_text().replace("norm_cfg=", "patch_cfg=dict(bias=False), norm_cfg="))
    text = config.read_text()
    statistics = []
    for scale in (1, 4):
        hook = f"dict(type='InputStressHook', probability=1, scale=({scale}, {scale}))"
        config.write_text(f'{text}custom_hooks = [{hook}]\n')
        tiny_runs.call(train, config, '--work-dir', tmp_path / 'work', '--cfg-options',
                       'optim_wrapper.optimizer.lr=0.0')
        state = torch.load(tmp_path / 'work/epoch_1.pth', weights_only=False)['state_dict']
        # What is left of the initial 1 after two steps of alpha=0.9.
        statistics.append(state['backbone.patch_embed.norm.running_var'] - 0.81)
    torch.testing.assert_close(statistics[1], 16 * statistics[0], rtol=1e-3, atol=1e-4)
