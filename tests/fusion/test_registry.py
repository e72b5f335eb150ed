"""Rules of a user's own, and the report."""

import importlib
import sys

import pytest
import torch
from torch import nn

from mmunorm import UN, fuse_norms
from mmunorm.fusion import Averages, Behind, Chain, Emits, Into, Reads, Stays, fold_rule, rules

from . import models

X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


@pytest.fixture(autouse=True)
def _rules(monkeypatch):
    monkeypatch.setattr(rules, '_RULES', dict(rules._RULES))


def fold(model, x=X):
    models.randomize(model.double())
    before = models.outputs(model, x)
    report = fuse_norms(model)
    models.assert_equal(models.outputs(model, x), before)
    return {each.norm: each.where for each in report.folded}, {each.norm: each.where for each in report.kept}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x):
        return torch.softmax(self.query(x) @ self.key(x).mT, -1) @ self.value(x)


class MyBlock(nn.Module):
    """The block of `fold_rule`'s example."""

    def __init__(self):
        super().__init__()
        self.norm, self.attn = UN(8), Attention()

    def forward(self, x):
        return x + self.attn(self.norm(x))


READERS = ('attn.query', 'attn.key', 'attn.value')


@pytest.mark.parametrize('name', [MyBlock, f'{__name__}.MyBlock'])
def test_the_documented_example(name):
    @fold_rule(name)
    def my_block(block):
        yield Into('norm', *READERS)

    folded, kept = fold(MyBlock())
    assert folded == {'norm': ', '.join(READERS)} and not kept


def test_a_rule_may_leave_the_readers_to_the_parts_own_rule():
    @fold_rule(MyBlock)
    def my_block(block):
        yield Into('norm', 'attn')

    assert fold(MyBlock())[1] == {
        'norm': 'its neighbour attn is a Attention, not a linear layer or convolution'
    }

    @fold_rule(Attention)
    def attention(module):
        yield Reads('query', 'key', 'value')

    assert fold(nn.Sequential(MyBlock(), MyBlock()))[0] == {
        f'{i}.norm': ', '.join(f'{i}.{reader}' for reader in READERS) for i in (0, 1)
    }


def test_without_a_rule():
    assert fold(MyBlock())[1] == {'norm': 'no fold rule covers its place'}


def test_stays():
    @fold_rule(MyBlock)
    def my_block(block):
        yield Stays('norm', 'it is dear to me')

    assert fold(MyBlock())[1] == {'norm': 'it is dear to me'}


def test_a_norm_claimed_twice_stays():
    @fold_rule(MyBlock)
    def my_block(block):
        yield Into('norm', 'attn.query')
        yield Into('norm', 'attn.key')

    assert fold(MyBlock())[1] == {'norm': 'several fold rules cover its place'}


def test_a_reader_that_does_not_exist():
    @fold_rule(MyBlock)
    def my_block(block):
        yield Into('norm', 'attn.query', 'attn.nothing')

    assert fold(MyBlock())[1] == {'norm': 'its neighbour attn.nothing does not exist'}


def test_a_norm_that_does_not_exist_is_no_matter():
    @fold_rule(MyBlock)
    def my_block(block):
        yield Into('norm', *READERS)
        yield Into('another', 'attn.query')
        yield Behind('one_more', 'attn.query')

    assert list(fold(MyBlock())[0]) == ['norm']


def test_a_reader_of_two_norms():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.read = UN(8), UN(8), nn.Linear(8, 3)

        def forward(self, x):
            return self.read(self.one(x)) + self.read(self.two(x.sin()))

    @fold_rule(Sum)
    def rule(module):
        yield Into('one', 'read')
        yield Into('two', 'read')

    assert set(fold(Sum())[1].values()) == {'its neighbour read has two norms beside it'}


@pytest.mark.parametrize('norm', [UN, lambda c: nn.BatchNorm1d(c)])
@pytest.mark.parametrize('source', [nn.Linear(8, 6), nn.Linear(8, 6, bias=False)])
def test_behind(norm, source):
    class Stem(nn.Module):
        def __init__(self):
            super().__init__()
            self.project, self.norm = nn.Linear(8, 6, bias=source.bias is not None), norm(6)

        def forward(self, x):
            return self.norm(self.project(x)).relu()

    @fold_rule(Stem)
    def rule(module):
        yield Behind('norm', 'project')

    model = Stem()
    assert fold(model, X[:, 0])[0] == {'norm': 'back into project'}
    assert model.project.bias is not None


def test_behind_a_layer_that_does_not_fit():
    class Stem(nn.Module):
        def __init__(self):
            super().__init__()
            self.project, self.norm = nn.ConvTranspose2d(2, 6, 2), nn.BatchNorm2d(6)

        def forward(self, x):
            return self.norm(self.project(x))

    @fold_rule(Stem)
    def rule(module):
        yield Behind('norm', 'project')

    assert fold(Stem(), torch.randn(2, 2, 4, 4).double())[1] == {
        'norm': 'its neighbour project is a ConvTranspose2d, not a linear layer or convolution'
    }


class Body(nn.Module):
    """Gives two outputs, each of a norm."""

    def __init__(self):
        super().__init__()
        self.stem, self.low, self.high = nn.Linear(8, 8), UN(8), UN(8)

    def forward(self, x):
        x = self.stem(x)
        return self.low(x), self.high(x.sin())


class Mean(nn.Module):
    def forward(self, x):
        return tuple(each.mean(1) for each in x)


class Head(nn.Module):
    def __init__(self, low=True):
        super().__init__()
        self.fc_low, self.fc_high = nn.Linear(8, 2), nn.Linear(8, 3)
        self.low = low

    def forward(self, x):
        return (self.fc_low(x[-2]) if self.low else x[-1].new_zeros(2).add(torch.arange(2.0))), self.fc_high(
            x[-1]
        )


class Whole(nn.Module):
    def __init__(self, low=True):
        super().__init__()
        self.body, self.mean, self.head = Body(), Mean(), Head(low)

    def forward(self, x):
        return self.head(self.mean(self.body(x)))


def chain_rules(averages=True):
    @fold_rule(Body)
    def body(module):
        yield Emits('low', -2)
        yield Emits('high')

    if averages:

        @fold_rule(Mean)
        def mean(module):
            yield Averages()

    @fold_rule(Head)
    def head(module):
        yield Reads('fc_high')
        if module.low:
            yield Reads('fc_low', level=-2)

    @fold_rule(Whole)
    def whole(module):
        yield Chain('body', 'mean', 'head')


def test_a_chain_with_levels():
    chain_rules()
    assert fold(Whole()) == ({'body.low': 'head.fc_low', 'body.high': 'head.fc_high'}, {})
    assert fold(Whole(low=False)) == (
        {'body.high': 'head.fc_high'},
        {'body.low': 'nothing in this model reads it'},
    )


def test_a_chain_through_a_part_without_a_rule():
    chain_rules(averages=False)
    assert set(fold(Whole())[1].values()) == {
        'its neighbour mean is a Mean, not a linear layer or convolution'
    }


def test_an_average_with_a_hook():
    chain_rules()
    model = Whole()
    model.mean.register_forward_hook(lambda module, args, out: tuple(each**2 for each in out))
    assert set(fold(model)[1].values()) == {'its output passes through mean, which has forward hooks'}


def test_an_output_without_a_reader():
    chain_rules()
    assert set(fold(Body())[1].values()) == {'nothing in this model reads it'}


@pytest.mark.parametrize('nonsense', [3, 'MyBlock', int, MyBlock(), None, lambda block: ()])
def test_nonsense_is_refused(nonsense):
    with pytest.raises(TypeError, match='classes: must be nn.Module classes or their full names, got'):
        fold_rule(nonsense)


def test_the_nearest_class_wins_and_methods_count():
    class Child(MyBlock):
        pass

    class Other(MyBlock):
        def forward(self, x):
            return x + self.attn(self.norm(x).abs())

    @fold_rule(MyBlock)
    def block(module):
        yield Into('norm', *READERS)

    assert fold(Child())[0] and fold(Other())[1] == {'norm': 'no fold rule covers its place'}

    @fold_rule(Child)
    def child(module):
        yield Stays('norm', 'of another rule')

    assert fold(Child())[1] == {'norm': 'of another rule'} and fold(MyBlock())[0]


def test_the_report_reads_as_a_table():
    model = models.randomize(models.detector(add_extra_convs='on_input'))
    report = fuse_norms(model)
    assert (len(report.folded), len(report.kept)) == (11, 1)
    lines = str(report).splitlines()
    assert lines[0] == '11 of 12 norms folded'
    cells = [tuple(filter(None, line.split('  '))) for line in lines]
    assert ('backbone.patch_embed.norm', 'UN', 'back into backbone.patch_embed.projection') in [
        tuple(cell.strip() for cell in row) for row in cells
    ]
    stripped = [' '.join(line.split()) for line in lines]
    assert 'backbone.norm0 UN neck.lateral_convs.0.conv' in stripped
    assert (
        'backbone.stages.0.blocks.0.norm1 UN backbone.stages.0.blocks.0.attn.w_msa.qkv (padding filled)'
        in stripped
    )
    assert stripped[-2:] == [
        'kept:',
        'backbone.norm1 UN its neighbour neck.fpn_convs.2.conv is a 3x3 convolution '
        'that pads with zeros, which are not normalized',
    ]
    assert len(lines) == 1 + 2 + 11 + 2 + 1


@pytest.mark.parametrize('name', ['timm.models.swin_transformer.PatchMergin', 'timm.models.swim.PatchMerging'])
def test_a_mistyped_class_name_is_an_error_once_its_package_is_imported(name, monkeypatch):
    @fold_rule(name)
    def my_rule(module):
        yield Into('norm', 'reduction')

    with monkeypatch.context() as patch:
        for module in [module for module in sys.modules if module.partition('.')[0] == 'timm']:
            patch.delitem(sys.modules, module)
        fuse_norms(nn.Linear(2, 2).eval())  # no model of timm can be there
    import timm  # noqa: F401
    with pytest.raises(NameError, match=f'my_rule .* is for {name}, and there is no such class'):
        fuse_norms(nn.Linear(2, 2).eval())


def test_every_name_is_that_of_a_class():
    for package in ('mmdet', 'mmpretrain', 'timm'):
        importlib.import_module(package)
    rules.check_names()


def test_a_package_that_is_not_there_is_no_error():
    @fold_rule('no_such_package.models.Block')
    def my_rule(module):
        yield Into('norm', 'fc')

    assert not fuse_norms(nn.Linear(2, 2).eval()).kept
