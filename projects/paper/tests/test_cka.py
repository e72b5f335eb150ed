import itertools

import numpy as np
import pytest
import torch
from torch import nn

from projects.paper.paper.cka import _CHUNK, branch_layers, compare_models, gram, hsic


def hsic_by_sums(k, other):
    """The unbiased HSIC as Song et al. define it (Eq. 4): means over tuples of different indices."""
    n = len(k)
    pairs = np.mean([k[i, j] * other[i, j] for i, j in itertools.permutations(range(n), 2)])
    fours = np.mean([k[i, j] * other[q, r] for i, j, q, r in itertools.permutations(range(n), 4)])
    threes = np.mean([k[i, j] * other[i, q] for i, j, q in itertools.permutations(range(n), 3)])
    return pairs + fours - 2 * threes


def biased_cka(x, y):
    """Linear CKA of all examples at once, from the features (Kornblith et al., Eq. 4 for linear kernels)."""
    x, y = x - x.mean(0), y - y.mean(0)
    return (np.linalg.norm(x.T @ y) ** 2 / np.linalg.norm(x.T @ x) / np.linalg.norm(y.T @ y))


def features(n, seed=0, common=3, separate=4):
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randn(n, common, generator=generator, dtype=torch.float64)
    return [torch.cat([shared, torch.randn(n, separate, generator=generator, dtype=torch.float64)], dim=1)
            for _ in range(2)]


def test_unbiased_hsic_is_its_definition():
    x, y = features(6)
    # Whatever is added to every example's features does not matter, though the Gram matrices differ.
    k, m = (x + 3) @ (x + 3).T, y @ y.T
    for a, b in ((k, m), (gram(x + 3), gram(y))):
        assert hsic(a[None], b[None]).item() == pytest.approx(hsic_by_sums(k.numpy(), m.numpy()))


def cka(*pairs):
    """Of pairs of tensors, batch by batch, as the outputs of one layer each."""
    layer = dict(layer=nn.Identity())
    run_a, run_b = (lambda batch, i=i: layer['layer'](batch[i]) for i in (0, 1))
    return compare_models([(pair, len(pair[0])) for pair in pairs], run_a, run_b, layer, layer)[0].item()


def test_a_model_with_itself_and_with_a_rotation():
    x, _ = features(64)
    rotation = torch.linalg.qr(torch.randn(7, 7, dtype=torch.float64))[0]
    assert cka(*((part, 5 * part @ rotation + 1) for part in x.split(8))) == pytest.approx(1, abs=1e-12)


def test_minibatches_approach_the_cka_of_all_examples():
    x, y = features(8000)
    direct = biased_cka(x.numpy(), y.numpy())  # the bias is gone with so many examples
    assert 0.3 < direct < 0.6
    noise = torch.randn_like(y)
    assert cka(*zip(x.split(10), y.split(10), strict=True)) == pytest.approx(direct, abs=0.02)
    # The biased estimate is about 0.5 for such batches.
    assert cka(*zip(x.split(10), noise.split(10), strict=True)) == pytest.approx(0, abs=0.02)
    biased = [biased_cka(a.numpy(), b.numpy()) for a, b in zip(x.split(10), noise.split(10), strict=True)]
    assert 0.4 < np.mean(biased) < 0.6


def test_gram_in_chunks_keeps_digits():
    x = 1000 + torch.randn(4, 3, _CHUNK // 2)
    centred = x.double().flatten(1)
    centred = centred - centred.mean(0)
    torch.testing.assert_close(gram(x), centred @ centred.T, rtol=1e-12, atol=1e-9)


class Block(nn.Module):

    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(4)
        self.attn = nn.Sequential(nn.Linear(4, 4))
        self.ffn = nn.Linear(4, 4)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.ffn(self.norm1(x))  # the norm runs twice


def test_compares_models_on_batches():
    a, b = nn.Sequential(Block(), Block()), nn.Sequential(Block())
    assert list(branch_layers(a)) == [f'{i}.{name}' for i in (0, 1) for name in ('norm1', 'attn', 'ffn')]
    batches = torch.randn(18, 5, 4).split(8)
    cka, layers_a, layers_b = compare_models(
        [(batch, len(batch)) for batch in batches], a, b, branch_layers(a), branch_layers(b))
    assert layers_b == ['0.norm1', '0.attn', '0.ffn'] and len(layers_a) == 6
    assert not b[0].norm1._forward_hooks

    outputs = {}
    for model in (a, b):
        for name, module in branch_layers(model).items():
            module.register_forward_hook(lambda module, args, output, key=(model is a, name):
                                         outputs.setdefault(key, []).append(output.flatten(1).double()))
    hsics = np.zeros((3, 6, 3))
    for batch in batches[:2]:  # the last has 2 images
        outputs.clear()
        with torch.no_grad():
            a(batch), b(batch)
        grams = {key: gram(torch.cat(value, dim=1)).numpy() for key, value in outputs.items()}
        for i, j in np.ndindex(6, 3):
            k, m = grams[True, layers_a[i]], grams[False, layers_b[j]]
            hsics[:, i, j] += hsic_by_sums(k, m), hsic_by_sums(k, k), hsic_by_sums(m, m)
    np.testing.assert_allclose(cka, hsics[0] / np.sqrt(hsics[1] * hsics[2]), rtol=1e-4, atol=1e-6)


def test_too_small_batches_are_refused():
    with pytest.raises(ValueError, match='at least 4 examples, got 3'):
        hsic(torch.ones(1, 3, 3), torch.ones(1, 3, 3))
    with pytest.raises(ValueError, match='at least 4 images'):
        compare_models([(torch.ones(2, 4), 2)], nn.LayerNorm(4), nn.LayerNorm(4), {}, {})
