"""Rules of a user's own, and the report."""
import importlib
import sys

import pytest
import torch
from torch import nn

from mmunorm import UN, fuse_norms
from mmunorm.fusion import After, Averages, Chain, Emits, Into, Reads, Stays, fold_rule, rules

from . import models
from .blocks import Block

X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
READERS = ('attn.query', 'attn.key', 'attn.value')


@pytest.fixture(autouse=True)
def _rules(monkeypatch):
    monkeypatch.setattr(rules, '_RULES', dict(rules._RULES))


def places(model, x=X):
    report = models.fold(model, x)
    return {each.norm: each.where for each in report.folded}, {each.norm: each.where for each in report.kept}


def kind(name, compute, **parts):
    """A class of modules that compute this with new parts each."""
    return type(name, (Block, ), dict(
        __init__=lambda self: Block.__init__(self, compute, {part: make() for part, make in parts.items()}),
        __module__=__name__))


def linear(*sizes, **kwargs):
    return lambda: nn.Linear(*sizes, **kwargs)


def norm():
    return UN(8)


Attention = kind('Attention', lambda self, x: torch.softmax(self.query(x) @ self.key(x).mT, -1) @ self.value(x),
                 **dict.fromkeys(('query', 'key', 'value'), linear(8, 8, bias=False)))
# The block of `fold_rule`'s example.
MyBlock = kind('MyBlock', lambda self, x: x + self.attn(self.norm(x)), norm=norm, attn=Attention)


@pytest.mark.parametrize('name', [MyBlock, f'{__name__}.MyBlock'])
def test_the_documented_example(name):
    assert places(MyBlock())[1]['norm'].startswith('no fold rule knows MyBlock, which may use it in another way; give')

    @fold_rule(name)
    def my_block(block):
        yield Into('norm', *READERS)

    assert places(MyBlock()) == ({'norm': ', '.join(READERS)}, {})


def test_a_rule_may_leave_the_readers_to_the_parts_own_rule():
    fold_rule(MyBlock)(lambda block: [Into('norm', 'attn')])
    assert places(MyBlock())[1] == {'norm': 'its neighbour attn is a Attention, not a linear layer or convolution'}
    fold_rule(Attention)(lambda module: [Reads('query', 'key', 'value')])
    assert places(nn.Sequential(MyBlock(), MyBlock()))[0] == {
        f'{i}.norm': ', '.join(f'{i}.{reader}' for reader in READERS) for i in (0, 1)}


@pytest.mark.parametrize('facts, why', [
    ([Stays('norm', 'it is dear to me')], 'it is dear to me'),
    ([Into('norm', 'attn.query'), Into('norm', 'attn.key')], 'several fold rules cover its place'),
    ([Into('norm', 'attn.query', 'attn.nothing')], 'its neighbour attn.nothing does not exist'),
    ([Into('norm', *READERS), Into('no_norm', 'attn.query'), After('none', 'attn.query')], None)])
def test_what_a_rule_says_is_checked(facts, why):
    fold_rule(MyBlock)(lambda block: facts)
    assert places(MyBlock())[1] == ({} if why is None else {'norm': why})


def test_a_reader_of_two_norms():
    both = kind('Both', lambda self, x: self.read(self.one(x)) + self.read(self.two(x.sin())), one=norm, two=norm,
                read=linear(8, 3))
    fold_rule(both)(lambda module: [Into('one', 'read'), Into('two', 'read')])
    assert set(places(both())[1].values()) == {'its neighbour read has two norms beside it'}


def stem(project, last, first=nn.Identity):
    """A norm after a layer, and if it is asked for one before it."""
    cls = kind('Stem', lambda self, x: self.norm(self.project(self.first(x))).sin(), first=first, project=project,
               norm=last)
    fold_rule(cls)(lambda module: [After('norm', 'project'), Into('first', 'project')])
    return cls()


@pytest.mark.parametrize('bias', [False, True])
@pytest.mark.parametrize('kind', [UN, nn.BatchNorm1d])
def test_norms_before_and_after_a_layer(kind, bias):
    model = stem(linear(8, 6, bias=bias), lambda: kind(6))
    assert places(model, X[:, 0]) == ({'norm': 'back into project'}, {}) and model.project.bias is not None
    model = stem(linear(8, 6, bias=bias), lambda: kind(6), lambda: kind(8))
    assert places(model, X[:, 0]) == ({'first': 'project', 'norm': 'back into project'}, {})


def test_a_layer_before_it_that_does_not_fit():
    model = stem(lambda: nn.ConvTranspose2d(2, 6, 2), lambda: nn.BatchNorm2d(6))
    assert places(model, torch.randn(2, 2, 4, 4).double())[1] == {
        'norm': 'its neighbour project is a ConvTranspose2d, not a linear layer or convolution'}


def two_outputs(self, x):
    x = self.stem(x)
    return self.low(x), self.high(x.sin())


Body = kind('Body', two_outputs, stem=linear(8, 8), low=norm, high=norm)
Mean = kind('Mean', lambda self, x: tuple(each.mean(1) for each in x))
HEADS = dict(fc_low=linear(8, 2), fc_high=linear(8, 3))
Head = kind('Head', lambda self, x: (self.fc_low(x[-2]), self.fc_high(x[-1])), **HEADS)
HighHead = kind('HighHead', lambda self, x: self.fc_high(x[-1]), **HEADS)


def test_a_chain():
    whole, high = (kind('Whole', lambda self, x: self.head(self.mean(self.body(x))), body=Body, mean=Mean, head=head)
                   for head in (Head, HighHead))
    fold_rule(Body)(lambda body: [Emits('low', -2), Emits('high')])
    fold_rule(Head)(lambda head: [Reads('fc_high'), Reads('fc_low', level=-2)])
    fold_rule(HighHead)(lambda head: [Reads('fc_high')])
    fold_rule(whole, high)(lambda whole: [Chain('body', 'mean', 'head')])
    assert set(places(whole())[1].values()) == {'its neighbour mean is a Mean, not a linear layer or convolution'}
    fold_rule(Mean)(lambda mean: [Averages()])
    assert places(whole()) == ({'body.low': 'head.fc_low', 'body.high': 'head.fc_high'}, {})
    unread = 'nothing in this model reads it'
    assert places(high()) == ({'body.high': 'head.fc_high'}, {'body.low': unread})
    assert set(places(Body())[1].values()) == {unread}
    model = whole()
    model.mean.register_forward_hook(lambda module, args, out: tuple(each**2 for each in out))
    assert set(places(model)[1].values()) == {'its output passes through mean, which has forward hooks'}


@pytest.mark.parametrize('nonsense', [3, 'MyBlock', int, MyBlock(), None, lambda block: ()])
def test_nonsense_is_refused(nonsense):
    with pytest.raises(TypeError, match='classes: must be nn.Module classes or their full names, got'):
        fold_rule(nonsense)


class Child(MyBlock):
    pass


class Other(MyBlock):
    def forward(self, x):
        return x + self.attn(self.norm(x).abs())


def test_the_nearest_class_wins_and_methods_count():
    fold_rule(MyBlock)(lambda block: [Into('norm', *READERS)])
    assert places(Child())[0] and places(Other())[1]['norm'].startswith('no fold rule knows Other')
    fold_rule(Child)(lambda block: [Stays('norm', 'of another rule')])
    assert places(Child())[1] == {'norm': 'of another rule'} and places(MyBlock())[0]


def test_the_report_reads_as_a_table():
    report = fuse_norms(models.randomize(models.detector(add_extra_convs='on_input')))
    lines = str(report).splitlines()
    assert lines[0] == '11 of 12 norms folded' and len(lines) == 1 + 2 + 11 + 2 + 1
    stripped = [' '.join(line.split()) for line in lines]
    for line in ('backbone.patch_embed.norm UN back into backbone.patch_embed.projection',
                 'backbone.norm0 UN neck.lateral_convs.0.conv', 'backbone.stages.0.blocks.0.norm1 UN '
                 'backbone.stages.0.blocks.0.attn.w_msa.qkv (padding filled)'):
        assert line in stripped
    assert stripped[-2:] == ['kept:', 'backbone.norm1 UN its neighbour neck.fpn_convs.2.conv is a 3x3 convolution '
                             'that pads with zeros, which are not normalized']


@pytest.mark.parametrize('name', ['timm.models.swin_transformer.PatchMergin', 'timm.models.swim.PatchMerging'])
def test_a_mistyped_class_name_is_an_error_once_its_package_is_imported(name, monkeypatch):
    @fold_rule(name, 'no_such_package.models.Block')
    def my_rule(module):
        yield Into('norm', 'reduction')

    with monkeypatch.context() as patch:
        for module in [module for module in sys.modules if module.partition('.')[0] == 'timm']:
            patch.delitem(sys.modules, module)
        fuse_norms(nn.Linear(2, 2).eval())  # no model of timm can be there
    import timm  # noqa: F401
    with pytest.raises(NameError, match=f'my_rule .* is for {name}, and there is no such class'):
        fuse_norms(nn.Linear(2, 2).eval())


def test_our_rules_name_classes_that_exist():
    for package in ('mmdet', 'mmpretrain', 'timm'):
        importlib.import_module(package)
    rules.check_names()
