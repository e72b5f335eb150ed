import pytest
import torch

from projects.deep.deep import ResidualSwinTransformer
from tests.backbones.test_swin import ALL_STAGES, IMAGES, NO_WARMUP, SMALL, train_step


def test_frozen_stages_freeze_their_connections():
    model = ResidualSwinTransformer(
        **SMALL, out_indices=ALL_STAGES, frozen_stages=1, residual_cfg=dict(type='LayerScale'))

    def is_frozen(name):
        return name.startswith(('patch_embed.', 'stages.0.', 'stages.1.', 'norm0.', 'norm1.'))

    # From the start, because DDP reads requires_grad before the first call of train().
    assert all(parameter.requires_grad != is_frozen(name) for name, parameter in model.named_parameters())
    train_step(model, torch.randn(IMAGES))
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == is_frozen(name), name


@pytest.mark.filterwarnings('ignore:torch.utils.checkpoint')
@pytest.mark.parametrize('scheme', ['PreNorm', 'BranchNorm', 'ReZero', 'SubLN', 'PeriNorm'])
def test_activation_checkpointing_counts_each_step_once(scheme):
    norm_cfg = {} if scheme == 'ReZero' else dict(norm_cfg=NO_WARMUP)
    plain, checkpointed = (
        ResidualSwinTransformer(**SMALL, **norm_cfg, residual_cfg=dict(type=scheme), with_cp=with_cp)
        for with_cp in (False, True))
    checkpointed.load_state_dict(plain.state_dict())
    for model in (plain, checkpointed):
        if scheme == 'BranchNorm':
            model.update_clock.updates.fill_(100)
            model.update_clock.is_counted = True
        torch.manual_seed(0)
        for _ in range(3):
            train_step(model, torch.randn(IMAGES))
    assert scheme == 'ReZero' or plain.norm3.num_batches_tracked == 3
    torch.testing.assert_close(checkpointed.state_dict(), plain.state_dict())
    for (name, parameter), other in zip(plain.named_parameters(), checkpointed.parameters(), strict=True):
        torch.testing.assert_close(other.grad, parameter.grad, msg=name)
