"""The task in mmengine's Runner, by the tools, on synthetic sentences: a target is its source reversed."""
import json
import math

import pytest
import torch
from mmengine.evaluator import BaseMetric
from mmengine.registry import DATASETS, FUNCTIONS, METRICS
from torch.nn.utils.rnn import pad_sequence

from projects.translation.translation import InverseSquareRoot
from projects.translation.translation.text.ids import EOS, PAD
from tests import tiny_runs

from .models import sentences, task

CONFIG = """
_base_ = ['{root}/projects/translation/configs/_base_/translation.py']
model = dict(
    beam=2,
    backbone=dict(
        vocab_size=12, norm_cfg=dict(type='UN', outlier_filter=False, warmup_iters=2), dropout=0.1,
        arch=dict(encoder_layers=1, decoder_layers=1, embed_dims=16, feedforward_channels=24, num_heads=2),
        residual_cfg=dict(type='BranchNorm', warmup_iters=3)))
train_dataloader = dict(
    _delete_=True, batch_size=4, num_workers=0, sampler=dict(type='DefaultSampler', shuffle=True),
    collate_fn=dict(type='pad_reversed'), dataset=dict(type='ReversedSentences'))
val_dataloader = train_dataloader
test_dataloader = train_dataloader
val_evaluator = dict(_delete_=True, type='SameLength')
test_evaluator = val_evaluator
train_cfg = dict(max_iters=4, val_interval=4)
param_scheduler = [dict(type='InverseSquareRoot', warmup=2, by_epoch=False)]
default_hooks = dict(logger=dict(interval=1), checkpoint=dict(interval=2))
randomness = dict(seed=0)
"""


@DATASETS.register_module()
class ReversedSentences(torch.utils.data.Dataset):
    metainfo = {}

    def __len__(self):
        return 12

    def __getitem__(self, i):
        source, = sentences(3 + i % 4, seed=i)
        return dict(source=source, target=torch.cat([source[:-1].flip(0), source[-1:]]), index=i)


@FUNCTIONS.register_module()
def pad_reversed(items):
    batch = {side: pad_sequence([item[side] for item in items], batch_first=True) for side in ('source', 'target')}
    return dict(batch, index=torch.tensor([item['index'] for item in items]))


@METRICS.register_module()
class SameLength(BaseMetric):
    """The share of translations that are as long as the reference, and how many there are."""

    def process(self, data_batch, data_samples):
        for target, sample in zip(data_batch['target'], data_samples, strict=True):
            self.results.append((sample['index'], len(sample['hypotheses'][0]) == target.ne(PAD).sum() - 1))

    def compute_metrics(self, results):
        assert len(dict(results)) == len(results) == 12
        return dict(share=sum(float(same) for _, same in results) / len(results))


def test_the_loss_is_a_mean_over_tokens_and_the_perplexity_is_of_the_plain_one():
    model = task('PreNorm', 'LN')
    source, target = sentences(5, 7, 2), sentences(6, 3, 4, seed=1)
    losses = model(source, target, mode='loss')
    log_probs = model(source, target).log_softmax(-1)
    real = target != PAD
    plain = -log_probs.gather(-1, target.unsqueeze(-1)).squeeze(-1)[real]
    smooth = -log_probs.mean(-1)[real]
    assert losses['loss'].item() == pytest.approx((0.9 * plain + 0.1 * smooth).mean().item())
    assert losses['perplexity'].item() == pytest.approx(plain.mean().exp().item())
    assert not losses['perplexity'].requires_grad


def test_predictions_have_lines_scores_and_no_special_token():
    model = task('PreNorm', 'LN', beam=3).eval()
    source = sentences(5, 7, 2)
    found = model(source, index=torch.tensor([4, 0, 9]), mode='predict')
    assert [sample['index'] for sample in found] == [4, 0, 9]
    for sample in found:
        assert len(sample['hypotheses']) == len(sample['scores']) == 3
        assert sample['scores'] == sorted(sample['scores'], reverse=True)
        assert all(ids.dtype == torch.int64 and not set(ids.tolist()) & {PAD, 2, EOS} for ids in sample['hypotheses'])
    assert [sample['index'] for sample in model(source, mode='predict')] == [0, 1, 2]


@pytest.mark.parametrize('kwargs, message', [
    (dict(beam=0), 'beam must be an int of at least 1, got 0'),
    (dict(length_penalty=-1.), 'length_penalty must be from 0 to 10, got -1.0')])
def test_wrong_arguments(kwargs, message):
    with pytest.raises(ValueError, match=message):
        task(**kwargs)


def test_it_learns_to_reverse():
    model = task('PreNorm', beam=1, norm_cfg=dict(type='UN', outlier_filter=False, warmup_iters=20)).float()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    batch = pad_reversed([ReversedSentences()[i] for i in range(8)])
    for _ in range(70):
        optimizer.zero_grad()
        model(**batch, mode='loss')['loss'].backward()
        optimizer.step()
    model.eval()
    for target, found in zip(batch['target'], model(**batch, mode='predict'), strict=True):
        assert [*found['hypotheses'][0].tolist(), EOS] == target[target != PAD].tolist()


def test_the_rate_grows_and_falls_with_the_root():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    scheduler = InverseSquareRoot(optimizer, warmup=4)
    rates = []
    for _ in range(16):
        rates.append(optimizer.param_groups[0]['lr'])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([0.5 * min(t / 4, (4 / t)**0.5) for t in range(1, 17)])
    with pytest.raises(ValueError, match='warmup must be an int of at least 1, got 0'):
        InverseSquareRoot(optimizer, warmup=0)


def read_log(folder):
    entries = [json.loads(line) for line in next(folder.glob('*/vis_data/scalars.json')).open()]
    return [entry for entry in entries if 'loss' in entry]


@pytest.fixture
def config(tmp_path, in_a_folder):
    path = tmp_path / 'reversed_un.py'
    path.write_text(CONFIG.format(root=tiny_runs.ROOT))
    return path


def test_trains_resumes_tests_and_folds(config, tmp_path):
    train, test = tiny_runs.load_tool('train'), tiny_runs.load_tool('test')
    tiny_runs.call(train, config)
    log = read_log(tmp_path / 'work_dirs/reversed_un')
    assert [entry['lr'] for entry in log] == pytest.approx([7e-4 * rate for rate in (0.5, 1, (2 / 3)**0.5, 0.5**0.5)])
    assert all(math.isfinite(entry['loss']) and entry['perplexity'] > 1 for entry in log)
    whole = torch.load(tmp_path / 'work_dirs/reversed_un/iter_4.pth', weights_only=False)['state_dict']
    assert whole['backbone.update_clock.updates'] == 4

    tiny_runs.call(train, config, '--resume', 'work_dirs/reversed_un/iter_2.pth', '--work-dir', 'resumed')
    resumed = torch.load(tmp_path / 'resumed/iter_4.pth', weights_only=False)['state_dict']
    assert whole.keys() == resumed.keys() and resumed['backbone.update_clock.updates'] == 4

    metrics = [tiny_runs.call(test, config, 'work_dirs/reversed_un/iter_4.pth', *fuse) for fuse in (
        [], ['--fuse', '--save', 'folded.pth'])]
    assert metrics[0] == metrics[1] and 0 <= metrics[0]['share'] <= 1
    assert tiny_runs.call(test, config, 'folded.pth') == metrics[0]


def test_trains_with_another_norm(config, tmp_path):
    train = tiny_runs.load_tool('train')
    tiny_runs.call(train, config, '--norm', 'BN', '--cfg-options', 'train_cfg.max_iters=2')
    assert all(math.isfinite(entry['loss']) for entry in read_log(tmp_path / 'work_dirs/reversed_bn'))
