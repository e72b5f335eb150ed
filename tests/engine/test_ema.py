import pytest
import torch
from mmengine.hooks import EMAHook
from mmengine.model import ExponentialMovingAverage
from mmengine.registry import MODELS
from torch import nn

import mmunorm  # noqa: F401
from mmunorm.engine.ema import BufferedEMA
from mmunorm.norms import UN


@pytest.mark.parametrize('kind', ['BufferedEMA', 'ExponentialMovingAverage'])
def test_weights_are_averaged_and_counters_copied(kind):
    """Statistics are averaged too; mmengine's default copies them."""
    model = nn.Sequential(nn.Linear(3, 4), UN(4, warmup_iters=1))
    average = MODELS.build(dict(type=kind, model=model, momentum=0.25))
    assert isinstance(average, BufferedEMA) == (kind == 'BufferedEMA')
    averaged = model.state_dict() if kind == 'BufferedEMA' else dict(model.named_parameters())
    expected = None
    for _ in range(6):
        model(torch.randn(5, 3)).square().sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
        average.update_parameters(model)
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        if expected is None:
            expected = state
        for name, tensor in state.items():
            if tensor.is_floating_point() and name in averaged:
                expected[name] = 0.75 * expected[name] + 0.25 * tensor
            else:
                expected[name] = tensor
    actual = average.module.state_dict()
    assert actual['1.num_batches_tracked'] == 6
    assert set(actual) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, msg=name)


@pytest.mark.parametrize('kind', [BufferedEMA, ExponentialMovingAverage])
def test_the_hook_swaps_statistics_with_weights(kind):
    model = UN(2)
    hook = EMAHook(ema_type=kind.__name__, momentum=0.5)
    hook.src_model, hook.ema_model = model, kind(model, momentum=0.5)
    with torch.no_grad():
        for tensor in (model.weight, model.running_var):
            tensor.fill_(3)
    hook._swap_ema_parameters()
    assert model.weight.tolist() == [1, 1]
    # With mmengine's default the averaged weights are validated with the model's own statistics.
    assert model.running_var.tolist() == ([1, 1] if kind is BufferedEMA else [3, 3])
    hook._swap_ema_parameters()
    assert model.weight.tolist() == model.running_var.tolist() == [3, 3]
