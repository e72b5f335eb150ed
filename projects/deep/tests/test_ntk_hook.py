import pytest
import torch

from mmunorm.utils import PreflightError
from projects.deep.deep.init import ntk_parametrize

from .runs import BackboneModel, backbone_runner


def test_trains_as_a_parametrized_model_does(tmp_path):
    run = backbone_runner(tmp_path, 4, hooks=['NTKHook'])
    torch.manual_seed(1)
    run.model.init_weights()
    by_hand = BackboneModel(dict(type='PreNorm'))
    by_hand.load_state_dict(run.model.state_dict())
    plain = run.model.backbone.layers[0].ffn.layers[1].weight.clone()
    run.train()
    assert run.model.state_dict().keys() == by_hand.state_dict().keys()

    ntk_parametrize(by_hand)
    optimizer = torch.optim.Adam(by_hand.parameters(), lr=0.01)
    for batch in run.train_dataloader:
        optimizer.zero_grad()
        by_hand(**batch)['loss'].backward()
        optimizer.step()
    weight = by_hand.backbone.layers[0].ffn.layers[1].weight
    torch.testing.assert_close(run.model.backbone.layers[0].ffn.layers[1].weight, weight, rtol=1e-5, atol=1e-6)
    # Four steps of Adam, each of the rate over the root of 12 inputs.
    assert 0 < (weight - plain).abs().max() < 1.05 * 4 * 0.01 / 12**0.5


def test_checkpoints_are_plain_and_resume(tmp_path):
    def train(name, **kwargs):
        # Adam would amplify the rounding of a zero gradient, such as that of the keys' biases.
        run = backbone_runner(tmp_path / name, 12, hooks=['NTKHook'], optim_wrapper=dict(
            optimizer=dict(type='SGD', lr=0.01, momentum=0.9)), **kwargs)
        run.train()
        return run.model.state_dict()

    whole, middle = train('whole'), tmp_path / 'whole/iter_6.pth'
    assert torch.load(middle, weights_only=False)['state_dict'].keys() == whole.keys()
    resumed = train('resumed', load_from=str(middle), resume=True)
    saved = torch.load(tmp_path / 'resumed/iter_12.pth', weights_only=False)['state_dict']
    torch.testing.assert_close(resumed, whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(saved, resumed, rtol=1e-6, atol=0)


def test_averaged_weights_are_refused(tmp_path):
    run = backbone_runner(tmp_path, 1, hooks=['NTKHook', 'EMAHook'])
    with pytest.raises(PreflightError, match='custom_hooks: NTKHook and EMAHook cannot be combined'):
        run.train()
