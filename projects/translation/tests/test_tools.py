"""The tools that make text, train subwords and compare translations."""
import shutil
from pathlib import Path

import pytest

from projects.photographs.photographs import apt
from projects.translation.translation.text import Subwords
from projects.translation.translation.text.lines import read_lines

from .text.conftest import VOCAB_SIZE, text  # noqa: F401  a fixture
from .text.makers import apt_lists, sentence_pairs

# A fake of apt-get: writes the lists where the configuration says.
APT_GET = """#!/bin/sh
test "$1" = -c && test "$3" = -q || exit 100
grep -qE '"en"; "it"' "$2" || echo 'W: no such language' >&2
cp FOLDER/lists/* "$(sed -n 's/Dir::State::lists "\\(.*\\)";/\\1/p' "$2")"
"""


@pytest.fixture
def fake_apt(tmp_path, monkeypatch):
    folder = tmp_path / 'apt'
    (folder / 'lists').mkdir(parents=True)
    for name, content in apt_lists(sentence_pairs(600)).items():
        (folder / 'lists' / name).write_text(content)
    for name, script in {'apt-get': APT_GET.replace('FOLDER', str(folder)),
                         'apt-helper': 'test "$1" = cat-file && cat "$2"'}.items():
        (folder / name).write_text(script if script.startswith('#') else f'#!/bin/sh\n{script}\n')
        (folder / name).chmod(0o755)
    monkeypatch.setenv('PATH', str(folder), prepend=':')
    monkeypatch.setenv('TMPDIR', str(folder))
    monkeypatch.setattr(apt.tempfile, 'tempdir', None)
    monkeypatch.setattr(apt, 'HELPER', str(folder / 'apt-helper'))
    return folder


MAKE = 'translation:make_translation', '--vocab-size', VOCAB_SIZE


def test_from_package_descriptions(call, fake_apt):
    pytest.importorskip('sentencepiece')
    printed = call(*MAKE)
    folder = Path('data/translation/en-it')
    counts = {}
    for name in ('train', 'valid', 'test'):
        sides = [list(read_lines(folder / f'{name}.{side}')) for side in ('src', 'tgt')]
        assert len(sides[0]) == len(sides[1]) > 0
        counts[name] = len(sides[0])
        assert f'{folder}/{name}.src, .tgt: {counts[name]} pairs' in printed
    assert counts['train'] > 500
    assert len(Subwords(folder / 'subwords.model')) == VOCAB_SIZE
    assert not list(fake_apt.glob('mmunorm-apt-*'))
    assert 'already exists' in call(*MAKE)
    assert 'with --force' in call(*MAKE[:2], 330) and (folder / 'train.src').exists()


def test_several_pairs_are_one_text_with_one_split(call, fake_apt):
    pytest.importorskip('sentencepiece')
    (fake_apt / 'lists/x_Translation-de').write_text(apt_lists(sentence_pairs(600), 'de')['x_Translation-de'])
    printed = call(*MAKE, '--pair', 'en-it', 'en-de')
    folder = Path('data/translation/en-de-it')
    english = {}
    for name in ('train', 'valid', 'test'):
        sources = list(read_lines(folder / f'{name}.src'))
        assert len(sources) == len(list(read_lines(folder / f'{name}.tgt')))
        german, italian = ([source[6:] for source in sources if source.startswith(token)]
                           for token in ('<2de> ', '<2it> '))
        assert german == italian and len(german) + len(italian) == len(sources) > 0
        assert f'{name}.src, .tgt: {len(sources)} pairs\n  <2de> {len(german)}\n  <2it> {len(italian)}\n' in printed
        english[name] = set(german)
    assert not english['train'] & english['test'] and not english['valid'] & english['test']
    assert Subwords(folder / 'subwords.model').encode(['<2de>', '<2it>']) == [[4], [5]]
    assert 'already exists' in call(*MAKE, '--pair', 'en-de', 'en-it', 'en-de')


def test_noise_stays_in_its_line(call, text):  # noqa: F811
    lines = list(read_lines(text / 'train.src'))
    printed = call('translation:add_noise', text / 'train.src', 'noisy.src')
    noisy = list(read_lines('noisy.src'))
    assert len(noisy) == 200
    assert printed == f'noisy.src: {sum(map(str.__ne__, lines, noisy))} of 200 lines have errors\n'
    changed = sum(a != b for pair in zip(lines, noisy, strict=True) for a, b in zip(*map(str.split, pair), strict=True))
    words = sum(len(word) > 1 for line in lines for word in line.split())
    assert 0.06 < changed / words < 0.12  # a few swaps change nothing
    for seed, same in ((0, True), (1, False)):
        call('translation:add_noise', text / 'train.src', 'again.src', '--seed', seed)
        assert (Path('again.src').read_text() == Path('noisy.src').read_text()) is same
    assert 'would overwrite' in call('translation:add_noise', 'noisy.src', 'noisy.src')
    assert 'would overwrite' in call('translation:train_subwords', 'noisy.src', '--out', 'noisy.src')


def test_errors_change_nothing(call, fake_apt, monkeypatch):
    pytest.importorskip('sentencepiece')
    error = call(*MAKE, '--pair', 'en-da')
    assert "no descriptions in the language 'da' (W: no such language); bring your own text" in error
    assert 'Vocabulary size too high' in call(*MAKE[:2], 9999)
    (fake_apt / 'lists/x_Packages').write_text('\n')
    assert 'too little text for train; bring your own text' in call(*MAKE)
    monkeypatch.setattr(apt, 'HELPER', 'nowhere')
    assert 'this system has no apt' in call(*MAKE) and 'train_subwords.py' in call(*MAKE)
    assert not list(Path('data/translation').iterdir())


def test_subwords_of_own_text(call, text):  # noqa: F811
    printed = call('translation:train_subwords', text / 'train.src', text / 'train.tgt', '--out', 'mine/a.model',
                   '--vocab-size', VOCAB_SIZE, '--type', 'bpe')
    assert printed == f'mine/a.model: {VOCAB_SIZE} subwords\n'
    assert len(Subwords('mine/a.model')) == VOCAB_SIZE
    assert 'cannot read the text none' in call('translation:train_subwords', 'none', '--out', 'b.model')


def test_two_systems_compared(call, text, tmp_path):  # noqa: F811
    pytest.importorskip('sacrebleu')
    reference = list(read_lines(text / 'train.tgt'))
    Path('a').write_text('\n'.join(line.replace('ehto', 'x') for line in reference) + '\n')
    shutil.copy(text / 'train.tgt', 'b')
    files = text / 'train.tgt', 'a', 'b'
    printed = call('translation:compare_translations', *files, '--samples', 50, '--examples', 2,
                   '--source', text / 'train.src').splitlines()
    row = next(line for line in printed if line.startswith('| BLEU')).strip('| ').split(' | ')
    assert float(row[3]) == pytest.approx(100) and 0 < float(row[1]) < 100
    assert float(row[5]) == pytest.approx(float(row[3]) - float(row[1]), abs=0.011) and float(row[6]) < 0.05
    assert any(line.startswith('chrF: sacrebleu nrefs:1|bs:50|seed:12345') for line in printed)
    examples = printed[printed.index('line 51'):]
    assert examples[2] == f'reference  {reference[50]}' and examples[5:7] == ['', 'line 151']
    Path('b').write_text('\n\n')
    assert 'a has 200 lines and b has 2 lines' in call('translation:compare_translations', *files)
