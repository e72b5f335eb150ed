"""PRepBN blends LayerNorm and RepBN, and folds once LayerNorm has faded out."""
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mmunorm import fuse_norms
from mmunorm.conversion import ConversionError, convert_norms
from mmunorm.norms import RepBN
from projects.paper.paper import PRepBN
from tests.norms import cases
from tests.norms import reference_family as ref


def layer_norm(x, ln_weight, ln_bias, eps=1e-5):
    """Ba et al., 2016."""
    centered = x - x.mean(1, keepdim=True)
    return ln_weight * centered / (centered.square().mean(1, keepdim=True) + eps).sqrt() + ln_bias


class ReferencePRepBN:
    """Guo et al., ICML 2024: `lambda * LN + (1 - lambda) * RepBN`, lambda linear in the step."""

    def __init__(self, rep_bn, ln, steps):
        self.rep_bn, self.ln, self.steps, self.t = rep_bn, ln, steps, 0

    def forward(self, x, padded):
        self.share = max(0., (self.steps - self.t) / self.steps)
        self.t += 1
        return self.share * self.ln.forward(x, padded) + (1 - self.share) * self.rep_bn.forward(x, padded)

    def backward(self, dy):
        dx_ln, grads_ln = self.ln.backward(self.share * dy)
        dx_bn, grads_bn = self.rep_bn.backward((1 - self.share) * dy)
        return dx_ln + dx_bn, dict(grads_ln, **grads_bn)

    def state(self):
        return self.rep_bn.state()


def build(steps=12):
    norm = PRepBN(6, steps=steps).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in norm.parameters():
        parameter.data.normal_(generator=generator)
    return norm


def prep_bn(norm, weight, bias, eta, ln_weight, ln_bias):
    ln = ref.ReferenceFormula(layer_norm, ln_weight=ln_weight, ln_bias=ln_bias)
    return ReferencePRepBN(ref.ReferenceBN(weight=weight, bias=bias, eta=eta), ln, norm.steps)


@pytest.mark.parametrize('masked', [False, True])
def test_outputs_gradients_and_state_of_every_step(masked):
    cases.assert_equals_reference(build(), prep_bn, 20, masked, 1e-9, 1e-9)


def test_a_step_that_is_computed_again_is_the_same_step():
    plain, again = build(), build()
    for _, x, dy in cases.sequence(15, 6):
        x, dy = map(torch.from_numpy, (x, dy))
        expected = cases.train_step(plain, x, dy)
        again.zero_grad()
        tx = x.clone().requires_grad_()
        y = checkpoint(again, tx, use_reentrant=False)
        y.backward(dy)
        found = [y.detach(), tx.grad, *(p.grad for p in again.parameters())]
        torch.testing.assert_close(found, expected)
    cases.assert_same_state(plain, again)


def test_it_folds_after_its_steps_and_says_why_not_before():
    norm = build()
    assert norm.fold_obstacle == 'blends LayerNorm in until 12 training steps are done, and has done 0'
    with pytest.raises(RuntimeError, match='PRepBN is not an affine map: it blends LayerNorm in until'):
        norm.affine()
    with pytest.raises(ConversionError, match='PRepBN blends LayerNorm in'):
        convert_norms(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6)), torch.randn(20, 6), dict(type='PRepBN', steps=5))
    assert '12 more training steps, and the run has 5' in norm.start_run(resumed=False, steps=5)
    cases.train_steps(norm.float(), 12)
    assert norm.start_run(resumed=True, steps=1) == ''
    model, x = nn.Sequential(norm, nn.Linear(6, 4)).eval(), torch.randn(5, 6)
    expected = model(x)
    assert fuse_norms(model, example=x).folded
    torch.testing.assert_close(model(x), expected)


def test_it_resumes_while_it_blends():
    norm = build().float()
    cases.train_steps(norm, 5)
    resumed = PRepBN(6, steps=12)
    resumed.load_state_dict(norm.state_dict())
    for one, other in zip(cases.train_steps(norm, 10, 5), cases.train_steps(resumed, 10, 5), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize('steps', [0, 1e5])
def test_steps_are_a_number(steps):
    with pytest.raises(ValueError, match=f'steps.*{steps}'):
        PRepBN(8, steps=steps)


def test_prepbn_computes_no_layer_norm_when_lambda_is_0():
    norm, resumed, x = build().float(), PRepBN(6, steps=12), torch.randn(5, 6)
    for step in range(16):
        norm.eval().train()  # as a validation does
        with mock.patch.object(F, 'layer_norm', wraps=F.layer_norm) as layer_norm:
            norm(x).sum().backward()
        assert layer_norm.called == (step < 12)
        # DistributedDataParallel waits for all of them.
        assert all(p.grad is not None for p in norm.parameters())
    resumed.load_state_dict(norm.state_dict())
    with mock.patch.object(F, 'layer_norm', None):
        resumed(x), resumed.eval()(x), norm.eval()(x)


def test_prepbn_starts_as_the_layer_norm_of_a_checkpoint_and_blends_at_inference_too():
    norm, ln, rep_bn, x = PRepBN(6, steps=12), nn.LayerNorm(6), RepBN(6).eval(), torch.randn(5, 6)
    nn.init.normal_(ln.weight)
    norm.load_state_dict(ln.state_dict(), strict=False)
    for steps, share in ((0, 1), (3, 0.75), (9, 0)):
        cases.train_steps(norm.train(), steps)
        rep_bn.load_state_dict({key: norm.state_dict()[key] for key in rep_bn.state_dict()})
        torch.testing.assert_close(norm.eval()(x), share * ln(x) + (1 - share) * rep_bn(x))
