"""Attention whose keys and values have a mean of 0 over the tokens is the same function, and keeps more in 8 bits."""
import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

from mmunorm import export, fuse_norms
from mmunorm.deploy.api import as_exportable
from mmunorm.deploy.formats.litert import programs_of
from mmunorm.deploy.rewrite.attention import center_attention
from mmunorm.deploy.rewrite.operators import for_chips

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


def written_out(q, k, v, mask):
    return F.dropout((q * 0.5) @ k.transpose(-2, -1) + mask, training=False).softmax(-1) @ v


def in_windows(q, k, v, mask):
    """The mask in another shape of the scores, as of shifted windows; the sum the other way round."""
    scores = (mask + (q @ k.permute(0, 1, 3, 2)).div(2)).unflatten(0, (1, -1)).flatten(0, 1)
    return scores.softmax(dim=3).clone() @ v


def twice_read(q, k, v, mask):
    """The scores and the probabilities are outputs, too, and the transposed keys have another reader."""
    keys = k.transpose(-2, -1)
    scores = q @ keys
    return (scores.softmax(-1) @ v).sum() + keys.sum()


def graph_of(attend, x, chips=False):
    program = torch.export.export(Attention(attend).double().eval(), (x, ), strict=False)
    return for_chips(program) if chips else program.module()


@pytest.mark.parametrize('chips', [False, True])
@pytest.mark.parametrize('attend', [
    lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v),
    lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, mask, scale=0.3),
    written_out, in_windows, twice_read])
def test_the_same_function(attend, chips):
    torch.manual_seed(0)
    x = torch.randn(3, 5, 8, dtype=torch.float64) * 3
    graph = graph_of(attend, x, chips)
    before = graph(x)
    assert center_attention(graph) == 0 and torch.equal(graph(x), before)  # few tokens
    assert center_attention(graph, 5) == 1
    torch.testing.assert_close(graph(x), before, rtol=1e-12, atol=1e-12)
    means = [node for node in graph.graph.nodes if node.target is torch.ops.aten.mean.dim]
    assert len(means) == 2 and all(node.meta['val'].shape[2] == 1 or node.meta['val'].shape[3] == 1 for node in means)


@pytest.mark.parametrize('attend', [
    lambda q, k, v, mask: (q @ k.transpose(-2, -1) * mask).softmax(-1) @ v,  # other factors within a row
    lambda q, k, v, mask: (q @ k.transpose(-2, -1)).relu().softmax(-1) @ v,
    lambda q, k, v, mask: (q @ k.transpose(-2, -1)).softmax(-2) @ v,  # columns sum to 1
    lambda q, k, v, mask: v.transpose(-2, -1) @ (q @ k.transpose(-2, -1)).softmax(-1),  # the other factor
    lambda q, k, v, mask: torch.cat([q @ k.transpose(-2, -1), mask.expand(3, -1, -1, -1)], -1).softmax(-1)[..., :5] @ v,
    lambda q, k, v, mask: (scores := q @ k.transpose(-2, -1)).softmax(-1) @ v + scores.sum()])  # are seen elsewhere
def test_what_stays(attend):
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    graph = graph_of(attend, x)
    before = graph(x)
    assert center_attention(graph, 5) == 0
    assert torch.equal(graph(x), before)


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
