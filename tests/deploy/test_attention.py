"""Attention whose keys and values have a mean of 0 over the tokens is the same function, and keeps more in 8 bits."""
import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

from mmunorm import export, fuse_norms
from mmunorm.deploy.api import as_exportable
from mmunorm.deploy.formats.litert import programs_of
from mmunorm.deploy.rewrite.operators import center_attention, for_chips

from .conftest import needs

pytestmark = pytest.mark.skipif(tuple(map(int, torch.__version__.split('.')[:2])) < (2, 9), reason='no torch.export')


class Attention(nn.Module):
    """Of two heads with 4 channels each; `attend(q, k, v, mask)` computes it."""

    def __init__(self, attend):
        super().__init__()
        self.attend, self.qkv, self.mask = attend, nn.Linear(8, 24), nn.Parameter(torch.randn(2, 5, 5))

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return self.attend(q, k, v, self.mask)


NOTHING = torch.ones(5, 5, dtype=torch.bool)
NOTHING[2] = False  # a row that allows nothing


@pytest.mark.parametrize('attend, number', [
    (lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v), 2),
    (lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, is_causal=True), 2),
    (lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, mask, scale=0.3), 2),
    (lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, mask > -0.5), 0),  # is not constant yet
    (lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, NOTHING), 0),
    (lambda q, k, v, mask: F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True), 0)])
def test_the_same_function(attend, number):
    torch.manual_seed(0)
    x = torch.randn(3, 5, 8, dtype=torch.float64) * 3
    graph = torch.export.export(Attention(attend).double().eval(), (x, ), strict=False).module()
    before = graph(x)
    assert torch.equal(center_attention(graph)(x), before)  # few tokens
    torch.testing.assert_close(center_attention(graph, 5)(x), before, rtol=1e-12, atol=1e-12)
    assert [node.meta['val'].shape[2] for node in graph.graph.nodes
            if node.target is torch.ops.aten.mean.dim] == [1] * number


@pytest.mark.parametrize('mask, number', [
    (torch.ones(101, 101).tril() > 0, 2), (torch.ones(101, 101).triu(1) > 0, 0)])  # the last token attends to nothing
def test_masks_are_constant_in_graphs_for_chips(mask, number):
    x = torch.randn(1, 101, 8)
    program = torch.export.export(Attention(
        lambda q, k, v, _: F.scaled_dot_product_attention(q, k, v, mask & mask)).eval(), (x, ), strict=False)
    graph = for_chips(program, centers=True)
    torch.testing.assert_close(graph(x), program.module()(x), rtol=0, atol=1e-6)
    assert sum(node.target is torch.ops.aten.mean.dim for node in graph.graph.nodes) == number


@pytest.mark.parametrize('side, number', [(20, 1), (18, 0)])  # 101 and 82 tokens
def test_full_integer_files_have_it(side, number):
    model = timm.create_model('vit_tiny_patch16_224', img_size=side, patch_size=2, embed_dim=8, depth=1, num_heads=2)
    exportable = as_exportable(model.eval(), torch.randn(1, 3, side, side))
    for for_integers in (False, True):
        (program, sample), = programs_of(exportable, for_integers).values()
        means = [node for node in program.graph.nodes if node.target is torch.ops.aten.mean.dim]
        assert len(means) == (2 * number if for_integers else 0)
        torch.testing.assert_close(program(**sample)['output'], *exportable.graph(*exportable.inputs))


@pytest.mark.slow
def test_vela_compiles_it(tmp_path, one_statistic):
    """Of attention over 101 tokens, Arm's compiler leaves no operator to the CPU."""
    needs('ethos-u')
    model = timm.create_model('vit_tiny_patch16_224', img_size=20, patch_size=2, embed_dim=8, depth=1, num_heads=2)
    images = torch.randn(4, 3, 20, 20, generator=torch.Generator().manual_seed(0))
    fuse_norms(model.eval(), example=images, rotate='hadamard')
    report = export(model, images[:1], tmp_path / 'm.vela.tflite', calibration=images)
    assert report.lines[-1] == 'operators left to the CPU: 0'
    layers = (tmp_path / 'm.vela.layers.csv').read_text()
    assert 'Softmax' in layers and 'Mean' in layers
