"""torch.compile of a Swin block with UN: one graph, and the same training as without."""
import copy

import pytest
import torch
from mmpretrain.models.backbones.swin_transformer import SwinBlock

from mmunorm.norms import UN

from ..versions import is_one_graph


def train(block, model, steps=12):
    """Losses of a few steps on fixed inputs; `model` runs `block`."""
    optimizer = torch.optim.SGD(block.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for step in range(steps):
        x = torch.randn(2, 64, 16, generator=generator)
        if step == 9:
            x[..., 3] *= 60  # an outlier
        loss = model(x.requires_grad_(), (8, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.grid
def test_a_swin_block_compiles_and_trains_as_without():
    torch.manual_seed(0)
    torch._dynamo.reset()
    norm_cfg = dict(type='UN', window=3, warmup_iters=4)
    block = SwinBlock(16, 2, window_size=4, shift=True, norm_cfg=norm_cfg).train()
    assert sum(isinstance(module, UN) for module in block.modules()) == 2
    twin = copy.deepcopy(block)
    stock = SwinBlock(16, 2, window_size=4, shift=True).train()
    fullgraph = is_one_graph(stock, torch.randn(2, 64, 16), (8, 8))
    compiled = torch.compile(twin, fullgraph=fullgraph)
    torch.testing.assert_close(train(twin, compiled), train(block, block), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(twin.state_dict(), block.state_dict(), rtol=1e-3, atol=1e-4)
    assert block.norm1.num_outliers > 0
