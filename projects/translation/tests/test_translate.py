"""Text in, text out: an untrained model, and subwords of a few sentences."""
import os

import pytest
import torch
from mmengine.config import Config

from mmunorm import fuse_norms
from mmunorm.checkpoints.folded import save_folded
from mmunorm.cli.data_checks import check_data
from mmunorm.config.models import build_model
from mmunorm.utils import PreflightError
from projects.translation.tests.models import randomize
from tests import tiny_runs

pytest.importorskip('sentencepiece')

LINES = ['the cat sits on the mat', 'a library of small tools', '', 'reads and writes text files', 'the dog']
CONFIG = """
_base_ = ['{root}/projects/translation/configs/debian_en_it_un.py']
model = dict(
    backbone=dict(
        vocab_size=285, arch=dict(encoder_layers=1, decoder_layers=1, embed_dims=16, feedforward_channels=16)))
test_dataloader = dict(dataset=dict(data_root='.', source='text', target='text'))
test_evaluator = dict(data_root='.', source='text', reference='text')
"""


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    from projects.translation.translation.text.subwords import train_subwords
    folder = tmp_path_factory.mktemp('translate')
    (folder / 'text').write_text('\n'.join(filter(None, LINES)) + '\n')
    train_subwords([folder / 'text'], folder / 'subwords.model', vocab_size=285)
    (folder / 'lines').write_text('\n'.join(LINES) + '\n')
    (folder / 'mine.py').write_text(CONFIG.format(root=tiny_runs.ROOT))
    cfg = Config.fromfile(folder / 'mine.py')
    torch.manual_seed(0)
    model = randomize(build_model(cfg)).eval()
    with torch.no_grad():
        model.backbone.embedding.weight.mul_(2)
    torch.save(dict(state_dict=model.state_dict()), folder / 'a.pth')
    report = fuse_norms(model, strict=True)
    save_folded(model, folder / 'folded.pth', cfg, report)
    return folder


@pytest.fixture
def translate(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    tool = tiny_runs.load_tool('translation:translate')

    def call(*arguments):
        tiny_runs.call(tool, 'mine.py', *arguments)
        return capsys.readouterr().out.split('\n')[:-1]

    return call


def test_each_line_has_its_translation_in_its_place(translate, folder):
    translations = translate('a.pth', 'lines')
    assert len(translations) == 5 and [bool(line) for line in translations] == [True, True, False, True, True]
    # Neither folding nor batches change the translations.
    assert translate('folded.pth', 'lines', '--batch-size', '1') == translations
    assert translate('a.pth', 'lines', '--fuse') == translations
    assert translate('a.pth', 'lines', '--beam', '1') != translations

    kept = os.dup(0)
    try:
        with open(folder / 'lines') as lines:
            os.dup2(lines.fileno(), 0)
        assert translate('a.pth') == translations
    finally:
        os.dup2(kept, 0)
        os.close(kept)


def test_several_hypotheses_with_scores(translate):
    lines = translate('a.pth', 'lines', '--nbest', '2', '--scores', '--length-penalty', '0.5')
    assert len(lines) == 2 * 4 + 1 and lines[4] == ''
    fields = [line.split('\t') for line in lines if line]
    assert [number for number, _, _ in fields] == ['1', '1', '2', '2', '4', '4', '5', '5']
    for (_, best, text), (_, second, other) in zip(fields[::2], fields[1::2], strict=True):
        assert 0 > float(best) >= float(second) and text != other


@pytest.mark.parametrize('arguments, message', [
    (['missing.pth'], 'there is no checkpoint missing.pth'),
    (['a.pth', 'missing'], 'cannot read the text missing: No such file or directory.'),
    (['a.pth', 'lines', '--nbest', '5'], '--nbest 5 is more than the 4 hypotheses that are followed'),
    (['a.pth', 'lines', '--length-penalty', '-1'], '--length-penalty must be from 0 to 10, got -1.0'),
    (['a.pth', 'lines', '--length-penalty', 'inf'], '--length-penalty must be from 0 to 10, got inf'),
    (['a.pth', 'lines', '--cfg-options', 'model.backbone.vocab_size=286'], 'subwords'),
    (['a.pth', 'lines', '--cfg-options', 'test_dataloader.dataset.subwords=none'], 'cannot read the subword model')])
def test_errors_are_one_line(translate, arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        translate(*arguments)
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith('error: ')]
    assert stop.value.code == 2 and len(errors) == 1 and message in errors[0]


def test_subwords_are_counted_before_a_run(folder, monkeypatch):
    monkeypatch.chdir(folder)
    cfg = Config.fromfile('mine.py')
    check_data(cfg, ['test'])
    cfg.model.backbone.vocab_size = 410
    with pytest.raises(PreflightError, match='subwords'):
        check_data(cfg, ['test'])
