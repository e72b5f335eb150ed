"""Fake quantization in torch names what costs accuracy in 8 bits, and predicts LiteRT's file."""
import math
import re

import pytest
import timm
import torch
from torch import nn

from mmunorm import compare, export
from mmunorm.deploy.bits import Bits, where_bits_go, write_norms_out
from mmunorm.deploy.layouts import for_chips

pytestmark = pytest.mark.skipif(tuple(map(int, torch.__version__.split('.')[:2])) < (2, 9), reason='no torch.export')


def vit():
    torch.manual_seed(0)
    model = timm.create_model('vit_tiny_patch16_224', img_size=24, patch_size=8, embed_dim=16, depth=2, num_heads=2)
    for block in model.blocks:
        block.attn.qkv.weight.data.normal_(0, 0.3)
        block.mlp.fc2.weight.data.normal_(0, 0.1)
    return model.eval()


def graph_of(model, x):
    return for_chips(torch.export.export(model, (x, ), strict=False))


def images(number=10):
    return torch.randn(number, 3, 24, 24, generator=torch.Generator().manual_seed(1))


def test_each_kind_and_block():
    graph, x = graph_of(vit(), images(1)), images()
    bits = where_bits_go(graph, x[:6].split(1), x[6:].split(1))
    assert bits.kinds.keys() == {'weights', 'linear layers', 'softmax', 'attention', 'activation functions', 'norms',
                                 'residual stream'}
    assert bits.blocks.keys() == {'blocks.0', 'blocks.1'}
    assert all(10 < snr < 80 for snr in (*bits.kinds.values(), *bits.blocks.values()))
    # Independent noises add up.
    together = -10 * math.log10(sum(10**(-snr / 10) for snr in bits.kinds.values()))
    assert bits.everything == pytest.approx(together, abs=2)
    first, second, last = bits.lines()
    lowest = min(bits.kinds, key=bits.kinds.get)
    assert f'tensor alone: {lowest} {bits.kinds[lowest]:.1f}, ' in first and second.startswith('of one block alone: ')
    assert last.startswith('if that is too little: ') and "int8='dynamic'" in last


def test_what_helps():
    for worst, advice in (('norms', 'fuse_norms(model, example='), ('residual stream', "rotate='hadamard'"),
                          ('weights', 'images')):
        snr = dict.fromkeys(('norms', 'residual stream', 'weights'), 30.) | {worst: 9.}
        assert advice in Bits(snr, {}, 9.).lines()[-1]


def test_the_mask_of_shifted_windows_does_not_set_the_steps():
    """It lowers scores by 1000, and a file to 8 below all others."""
    class Masked(nn.Module):
        def __init__(self, lowest):
            super().__init__()
            self.mask = nn.Parameter(torch.where(torch.arange(6) < 3, 0., lowest), requires_grad=False)

        def forward(self, x):
            return (x @ x.transpose(-2, -1) + self.mask).softmax(-1) @ x

    x = torch.randn(20, 2, 6, 4, generator=torch.Generator().manual_seed(0))
    snr = [where_bits_go(graph_of(Masked(lowest), x[:1]), x[:10].split(1), x[10:].split(1)).everything
           for lowest in (-20., -1000.)]
    assert snr[1] > snr[0] > 20


class Stream(nn.Module):
    """A stream whose first channel nothing reads."""

    def __init__(self, first):
        super().__init__()
        self.writer, self.reader = nn.Linear(8, 8), nn.Linear(8, 4)
        self.writer.bias.data[0] = first
        self.reader.weight.data[:, 0] = 0

    def forward(self, x):
        return self.reader(x + self.writer(x))


def test_one_large_channel_of_the_stream():
    """It leaves few of the steps to the others; weights have ranges of their own."""
    x, found = torch.randn(20, 3, 8), []
    for first in (0, 1000):
        torch.manual_seed(0)
        graph = graph_of(Stream(first), x[:1])
        found.append(where_bits_go(graph, x[:10].split(1), x[10:].split(1)).kinds)
    assert found[1]['residual stream'] < 5 < 15 < found[0]['residual stream']
    assert found[1]['weights'] == pytest.approx(found[0]['weights'], abs=1)


@pytest.mark.parametrize(('kind', 'arguments'), [
    ('LayerNorm', dict(normalized_shape=6)), ('LayerNorm', dict(normalized_shape=6, eps=0.3, bias=False)),
    ('LayerNorm', dict(normalized_shape=(5, 6))), ('RMSNorm', dict(normalized_shape=6)),
    ('RMSNorm', dict(normalized_shape=6, eps=0.2, elementwise_affine=False))])
def test_norms_written_out(kind, arguments):
    norm = getattr(nn, kind)(**arguments)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(2, 5, 6) * 0.3
    graph = graph_of(norm.eval(), x)
    write_norms_out(graph)
    assert 'norm' not in ' '.join(str(node.target) for node in graph.graph.nodes if node.op == 'call_function')
    torch.testing.assert_close(graph(x)[0] if isinstance(graph(x), tuple) else graph(x), norm(x))


@pytest.mark.slow
def test_the_file_has_the_predicted_accuracy(tmp_path):
    for package in ('litert_torch', 'ai_edge_quantizer', 'ai_edge_litert'):
        pytest.importorskip(package)
    model, x, path = vit(), images(40), tmp_path / 'm.tflite'
    report = export(model, x[:1], path, int8='full', calibration=x)
    predicted = float(re.search(r'by simulation: ([\d.]+) dB', str(report))[1])
    # The simulation's own images: every eighth of 40.
    assert compare(path, model, x[::8]).snr['output'] == pytest.approx(predicted, abs=1.5)
