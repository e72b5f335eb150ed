"""Rules of a user's own, norms that fold together among them, and the report."""
import pkgutil

import pytest
import torch
from torch import nn

from mmunorm import UN, fuse_norms
from mmunorm.fusion import Example, Fills, JointFold, fold_rule, rules
from mmunorm.fusion.padding import NeutralPadding, filled

from . import models
from .blocks import DIM, Block

X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


class MyModel(Block):
    """A user's."""

    def __init__(self):
        super().__init__(None, dict(norm=UN(8), fc=nn.Linear(8, 3)))

    def forward(self, x):
        return self.fc(self.norm(x))


class Child(MyModel):
    pass


class Other(MyModel):
    def forward(self, x):
        return self.fc(self.norm(x).abs())


def run(model):
    return model(X.to(model.fc.weight))


def where(model):
    report = models.fold(model, X)
    return [fold.where for fold in (*report.folded, *report.kept)]


@pytest.mark.parametrize('name', [MyModel, f'{__name__}.MyModel'])
def test_a_model_that_knows_how_to_run(name):
    assert where(MyModel()) == ['no fold rule can run MyModel: pass example=, such as torch.randn(1, 3, 224, 224)']
    fold_rule(name)(lambda model: [Example(run)])
    assert where(MyModel()) == where(Child()) == ['fc'] and where(Other())[0].startswith('no fold rule')
    # A part of another model does not say how that runs.
    assert where(nn.Sequential(MyModel()))[0].startswith('no fold rule can run Sequential')


def test_the_nearest_class_wins_and_methods_count():
    fold_rule(MyModel, methods=())(lambda model: [Example(run)])
    assert where(Other()) == ['its output is consumed by abs']
    fold_rule(Child)(lambda model: [])
    assert where(Child())[0].startswith('no fold rule') and where(MyModel()) == ['fc']


def test_the_first_run_that_the_model_takes_counts():
    calls = []

    def bad(model):
        calls.append('bad')
        raise ValueError('another size')

    fold_rule(MyModel)(lambda model: [Example(bad, run, bad)])
    assert where(MyModel()) == ['fc'] and calls == ['bad']
    fold_rule(MyModel)(lambda model: [Example(bad)])
    assert where(MyModel()) == ['MyModel does not run on the example of its fold rule (ValueError: another size); pass '
                                'another example= to fuse_norms']


class Windows(nn.Module):
    """Pads tokens with zeros to a multiple of four, and mixes each four."""

    def __init__(self):
        super().__init__()
        self.fc, self.gate = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)

    def pad(self, x):
        return nn.functional.pad(x, (0, 0, 0, -x.shape[1] % 4))

    def forward(self, x):
        y = self.pad(x)
        y = (self.fc(y) * self.gate(y)).unflatten(1, (-1, 4)).cumsum(2).flatten(1, 2)
        return y[:, :x.shape[1]]


class FilledWindows(NeutralPadding, Windows):
    def pad(self, x):
        return self.fill(x[:, :, None], (4, 1))[:, :, 0]


@pytest.mark.parametrize('gamma', ['some', 'none'])
def test_padding_that_a_rule_can_fill(gamma):
    model = nn.Sequential(UN(8), Windows())
    kept, = models.fold(model, X, example=X).kept
    assert 'together with other values, such as padding' in kept.where
    fold_rule(Windows)(lambda module: [Fills(lambda module, fill: filled(module, FilledWindows, fill))])
    other = torch.randn(1, 7, 8, dtype=torch.float64)
    fold, = models.fold(model, X, X[:, :4], other, gamma=gamma, example=X).folded
    assert fold.where == '1.fc, 1.gate (padding filled)'


def test_padding_around_padding_stays():
    """The inner module would take the outer one's padding for tokens."""
    class Around(Block):
        def forward(self, x):
            return self.inner(nn.functional.pad(x, (0, 0, 0, 2)))

    fold_rule(Windows, Around)(lambda module: [Fills(lambda module, fill: module)])
    model = nn.Sequential(UN(8), Around(None, dict(inner=Windows())))
    kept, = models.fold(model, X, example=X).kept
    assert 'or a wrong fold rule' in kept.where


@pytest.mark.parametrize('is_blocked', [False, True])
@pytest.mark.parametrize('names', [dict(norms=('norm', 'other')), dict(norms=('norm', ), requires=('other', ))])
def test_norms_fold_together_or_not_at_all(is_blocked, names):
    class Pair(Block):
        def forward(self, x):
            y = self.other(x)
            return self.fc(self.norm(x)) + self.other_fc(y) + (y.exp() if is_blocked else 0)

    fold_rule(Pair)(lambda module: [JointFold(**names)])
    pair = Pair(None, dict(norm=UN(DIM), other=UN(DIM), fc=nn.Linear(DIM, DIM), other_fc=nn.Linear(DIM, DIM)))
    report = models.fold(nn.Sequential(pair), X, example=X)
    assert [fold.norm for fold in report.folded] == ([] if is_blocked else ['0.norm', '0.other'])
    why = {fold.norm: fold.where for fold in report.kept}
    assert not is_blocked or why['0.norm'].startswith('it cannot be folded past 0.other: its output is consumed by exp')


@pytest.mark.parametrize('may_copy', [False, True])
def test_a_layer_may_get_a_copy_of_its_shared_weight(may_copy):
    class Tied(Block):
        def forward(self, x):
            return self.fc(self.norm(x + self.table(torch.arange(x.shape[1]))))

    fold_rule(Tied)(lambda module: [JointFold(copies=('fc', ))] * may_copy)
    model = Tied(None, dict(table=nn.Embedding(9, DIM), norm=UN(DIM), fc=nn.Linear(DIM, 9)))
    model.fc.weight = model.table.weight
    report = models.fold(model, X, example=X)
    assert [fold.where for fold in report.folded] == ['fc (with a copy of its shared weight)'] * may_copy
    assert (model.fc.weight is model.table.weight) != may_copy


@pytest.mark.parametrize('nonsense', [3, 'MyModel', int, MyModel(), None, lambda block: ()])
def test_nonsense_is_refused(nonsense):
    with pytest.raises(TypeError, match='classes: must be nn.Module classes or their full names, got'):
        fold_rule(nonsense)


def test_the_report_reads_as_a_table():
    report = fuse_norms(models.randomize(models.detector(add_extra_convs='on_input')))
    lines = str(report).splitlines()
    assert lines[0] == report.summary == '12 norms: 11 folded, 1 kept'
    assert lines[1].startswith('in an example, outputs change by ') and len(lines) == 2 + 2 + 1 + 2 + 11
    stripped = [' '.join(line.split()) for line in lines]
    for line in ('backbone.patch_embed.norm UN back into backbone.patch_embed.projection',
                 'backbone.norm0 UN neck.lateral_convs.0.conv', 'backbone.stages.0.blocks.0.norm1 UN '
                 'backbone.stages.0.blocks.0.attn.w_msa.qkv (padding filled)'):
        assert line in stripped
    assert stripped[3] == 'kept:' and stripped[4].startswith(  # exceptions first
        'backbone.norm1 UN its output is consumed by neck.fpn_convs.2.conv, a 3x3 convolution that pads with zeros')
    assert stripped[6] == 'folded:'


def test_our_rules_name_classes_that_exist():
    for name in filter(lambda name: isinstance(name, str), rules._RULES):
        if name.partition('.')[0] in ('mmdet', 'mmengine', 'mmpretrain', 'timm', 'torchvision'):
            pkgutil.resolve_name(name)
