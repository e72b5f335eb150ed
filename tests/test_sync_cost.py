"""The numbers of docs/scaling.md, and that they are what the norms really communicate."""
import importlib.util
import re

import pytest
import torch

from mmunorm.norms import UN, RepBN, convert_sync
from mmunorm.norms.sync import Ranks

from . import tiny_runs

spec = importlib.util.spec_from_file_location('sync_cost', tiny_runs.ROOT / 'benchmarks/sync_cost.py')
sync_cost = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sync_cost)


@pytest.mark.parametrize('norm', [UN, RepBN])
def test_bytes_are_those_that_a_norm_communicates(norm, monkeypatch):
    sent = []
    monkeypatch.setattr(Ranks, 'size', 2)
    monkeypatch.setattr('torch.distributed.all_reduce', lambda values, group: sent.append(values))
    layer = convert_sync(norm(10))
    layer(torch.randn(3, 4, 10, requires_grad=True)).sum().backward()
    assert len(sent) == 2
    assert sum(values.numel() * values.element_size() for values in sent) == sync_cost.bytes_a_step(layer)


def documented():
    rows = {}
    for line in (tiny_runs.ROOT / 'docs/scaling.md').read_text().splitlines():
        cells = [cell.strip() for cell in line.strip('|').split('|')]
        if line.startswith('| Swin-'):
            rows[cells[0]] = [float(re.sub('[,%]', '', cell)) for cell in cells[1:]]
    return rows


@pytest.mark.parametrize('row, config', [('Swin-T, classifier', 'swin_t_un_imagenet'),
                                         ('Swin-T, detector', 'swin_t_un_maskrcnn_3x')])
def test_the_table_of_swin_t(row, config):
    norms, total, gradients = sync_cost.cost(sync_cost.build_backbone(config))
    expected = [norms, 2 * norms, total, round(100 * total / gradients, 2),
                *(round(sync_cost.sent_a_step(total, ranks)) for ranks in (2, 8, 64))]
    assert documented()[row] == expected
