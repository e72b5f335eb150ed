import torch
from mmengine.registry import MODELS
from torch import nn

import mmunorm  # noqa: F401
from mmunorm.norms import UN


def test_weights_and_statistics_are_averaged_and_counters_copied():
    model = nn.Sequential(nn.Linear(3, 4), UN(4, warmup_iters=1))
    average = MODELS.build(dict(type='BufferedEMA', model=model, momentum=0.25))
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
            if tensor.is_floating_point():
                expected[name] = 0.75 * expected[name] + 0.25 * tensor
            else:
                expected[name] = tensor
    actual = average.module.state_dict()
    assert actual['1.num_batches_tracked'] == 6
    assert set(actual) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, msg=name)
