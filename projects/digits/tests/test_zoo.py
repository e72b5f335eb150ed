import hashlib
import json

import pytest
import torch

import projects.digits.digits  # noqa: F401, its optimizer wrapper
from tests import tiny_runs
from tests.tiny_runs import ROOT, load_tool


@pytest.fixture
def zoo(tmp_path, monkeypatch):
    """The tool with a list of two tiny models, in an empty folder; its commands run in this process."""
    zoo = load_tool('digits:zoo')
    monkeypatch.chdir(tmp_path)
    config = tiny_runs.write_classifier(tmp_path)
    zoo.commands = []

    def run_tool(command, cwd):
        assert cwd == tmp_path
        zoo.commands.append(command)
        if command[0] == 'tools/train.py':
            tiny_runs.call(load_tool('train'), *command[1:])
        return 0

    monkeypatch.setattr(zoo, 'ROOT', tmp_path)
    monkeypatch.setattr(zoo, 'run_tool', run_tool)
    monkeypatch.setattr(zoo, 'RECIPES', (zoo.Recipe('first', config.name), zoo.Recipe('ln', config.name, norm='LN')))
    return zoo


def test_the_recipes_exist():
    zoo = load_tool('digits:zoo')
    names = [recipe.name for recipe in zoo.RECIPES]
    assert len(set(names)) == len(names) > 1
    for i, recipe in enumerate(zoo.RECIPES):
        assert (ROOT / recipe.config).is_file() and (not recipe.data or (ROOT / recipe.data).is_file())
        assert not recipe.start or recipe.start in names[:i]


def test_models_are_trained_once_and_listed(zoo, tmp_path):
    zoo.main(['first'])
    out = tmp_path / zoo.OUT
    page = (out / 'README.md').read_text()
    assert '| ln | `classifier.py` | not trained here | - | - | - |' in page
    zoo.main([])
    assert [command[0] for command in zoo.commands] == [zoo.DIGITS, 'tools/train.py'] * 2
    zoo.main([])
    assert len(zoo.commands) == 4
    entries = json.loads((out / 'zoo.json').read_text())
    assert list(entries) == ['first', 'ln']
    page = (out / 'README.md').read_text()
    assert 'not trained here' not in page
    for name, entry in entries.items():
        weights = tmp_path / entry['weights']
        assert hashlib.sha256(weights.read_bytes()).hexdigest() == entry['sha256']
        content = torch.load(weights)
        assert 'optimizer' not in content and content['meta']['epoch'] == 1
        has_un = any(key.endswith('running_var') for key in content['state_dict'])
        assert has_un == (name == 'first')
        accuracy = entry['score']['top-1 accuracy (%)']
        assert f'top1: {accuracy:.4f}' in (tmp_path / entry['log']).read_text()
        log = entry['log'].rpartition('/')[2]
        assert f'| top-1 accuracy (%) {accuracy:g} | `{log}` | `weights.pth` | `{entry["sha256"][:12]}` |' in page
        assert entry['command'] in page and entry['cpu'] in page


def test_errors(zoo, tmp_path, capsys, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(zoo, 'RECIPES', (zoo.Recipe('second', 'classifier.py', start='first'), ))
        zoo.main(['second'])
    assert stop.value.code == 2 and 'second starts from first: train that first' in capsys.readouterr().err
    zoo.main(['first'])
    (tmp_path / zoo.OUT / 'first/weights.pth').write_bytes(b'')
    with pytest.raises(SystemExit) as stop:
        zoo.main([])
    assert stop.value.code == 2 and 'weights have changed' in capsys.readouterr().err


def test_a_model_that_is_not_listed(capsys):
    with pytest.raises(SystemExit) as stop:
        load_tool('digits:zoo').main(['third'])
    assert stop.value.code == 2 and 'there is no model third; choose from ' in capsys.readouterr().err
