"""What fold rules of projects add to a plan: norms that fold together or not at all, other changes, copied weights."""
import pytest
import torch
from torch import nn

from mmunorm import UN
from mmunorm.fusion import JointFold, fold_rule

from . import models
from .blocks import DIM, Block

TOKENS = torch.randn(2, 5, DIM, generator=torch.Generator().manual_seed(12), dtype=torch.float64)


@pytest.mark.parametrize('is_blocked', [False, True])
@pytest.mark.parametrize('names', [dict(norms=('norm', 'other')), dict(norms=('norm', ), requires=('other', ))])
def test_norms_fold_together_or_not_at_all(is_blocked, names):
    class Pair(Block):
        def forward(self, x):
            y = self.other(x)
            return self.fc(self.norm(x)) + self.other_fc(y) + (y.exp() if is_blocked else 0)

    fold_rule(Pair)(lambda module: [JointFold(**names)])
    pair = Pair(None, dict(norm=UN(DIM), other=UN(DIM), fc=nn.Linear(DIM, DIM), other_fc=nn.Linear(DIM, DIM)))
    report = models.fold(nn.Sequential(pair), TOKENS, example=TOKENS)
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
    report = models.fold(model, TOKENS, example=TOKENS)
    assert [fold.where for fold in report.folded] == ['fc (with a copy of its shared weight)'] * may_copy
    assert (model.fc.weight is model.table.weight) != may_copy
