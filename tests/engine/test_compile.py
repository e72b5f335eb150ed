"""`compile=True` in a config with UN: compiled by inductor, trained to the end, and resumed."""
import shutil

import pytest
import torch
from mmengine.model import BaseModel
from torch import nn

from mmunorm.norms import UN

from ..runs import loader, runner


class Model(BaseModel):

    def __init__(self, amp):
        super().__init__()
        self.amp = amp
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), UN(16, warmup_iters=2))

    def forward(self, x, mode='loss'):
        with torch.autocast('cpu', torch.bfloat16, enabled=self.amp):
            return dict(loss=(self.layers(x).float() - 1).square().mean())


def train(work_dir, steps, amp, **kwargs):
    """Epochs of three batches, the last of them smaller."""
    torch.manual_seed(1)
    data = loader([dict(x=torch.randn(5, 8)) for _ in range(10)], batch_size=4)
    run = runner(work_dir, Model(amp), data, steps, hooks=['OfflineNormHook'], interval=5, lr=0.05, **kwargs)
    run.train()
    return getattr(run.model, '_orig_mod', run.model).state_dict()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which('g++') is None, reason='inductor needs a C++ compiler')
@pytest.mark.parametrize('amp', [False, pytest.param(True, marks=pytest.mark.grid)])
def test_a_compiled_training_is_that_of_eager_mode(tmp_path, amp):
    torch._dynamo.reset()
    plain = train(tmp_path / 'plain', 9, amp)
    compiled = train(tmp_path / 'compiled', 9, amp, cfg=dict(compile=True))
    resumed = train(tmp_path / 'resumed', 9, amp, cfg=dict(compile=True), resume=True,
                    load_from=str(tmp_path / 'compiled/iter_5.pth'))
    assert plain['layers.1.num_batches_tracked'] == 9
    tolerance = dict(rtol=2e-2, atol=2e-2) if amp else dict(rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(compiled, plain, **tolerance)
    torch.testing.assert_close(resumed, compiled, **tolerance)
