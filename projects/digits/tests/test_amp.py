import pytest
import torch
from mmengine.registry import OPTIM_WRAPPERS
from torch import nn

from mmunorm.norms import UN
from projects.digits.digits import amp
from projects.digits.digits.amp import BFloat16OptimWrapper


def test_forward_in_bfloat16_and_update_in_float32():
    model = nn.Sequential(nn.Linear(4, 4), UN(4, warmup_iters=0), nn.Linear(4, 2))
    wrapper = OPTIM_WRAPPERS.build(
        dict(type='BFloat16OptimWrapper', optimizer=torch.optim.SGD(model.parameters(), lr=0.1)))
    assert isinstance(wrapper, BFloat16OptimWrapper)
    before = [parameter.clone() for parameter in model.parameters()]
    with wrapper.optim_context(model):
        y = model(torch.randn(8, 4))
        assert y.dtype == torch.bfloat16
        loss = y.float().square().mean()
    wrapper.update_params(loss)
    for old, new in zip(before, model.parameters(), strict=True):
        assert new.dtype == torch.float32 and not torch.equal(old, new)
    assert model[1].running_var.dtype == torch.float32
    assert model(torch.randn(8, 4)).dtype == torch.float32


@pytest.mark.parametrize('device', ['cpu', 'cuda'])
def test_flash_attention_is_off_in_steps_on_a_cpu(device, monkeypatch):
    monkeypatch.setattr(amp, 'get_device', lambda: device)
    model = nn.Linear(4, 4)
    wrapper = BFloat16OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    assert torch.backends.cuda.flash_sdp_enabled()
    with pytest.raises(KeyboardInterrupt), wrapper.optim_context(model):
        assert torch.backends.cuda.flash_sdp_enabled() == (device == 'cuda')
        raise KeyboardInterrupt
    assert torch.backends.cuda.flash_sdp_enabled()
