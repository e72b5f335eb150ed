import pytest

from tests.tiny_runs import ROOT, load_tool


@pytest.fixture
def demo(tmp_path, monkeypatch):
    """The demo in an empty folder; its commands are recorded in place of being run."""
    demo = load_tool('digits:demo_detector')
    commands = []

    def run(title, *command):
        commands.append(command)
        if command[0] == 'tools/train.py':
            folder = tmp_path / command[command.index('--work-dir') + 1]
            folder.mkdir(parents=True)
            (folder / 'last_checkpoint').write_text(f'{folder}/iter_1.pth')

    monkeypatch.setattr(demo, 'ROOT', tmp_path)
    monkeypatch.setattr(demo, 'run', run)
    demo.commands = commands
    return demo


def test_steps(demo, capsys):
    demo.main([])
    for command in demo.commands:
        assert (ROOT / command[0]).is_file()
        assert all((ROOT / word).is_file() for word in command if word.startswith('configs/'))
    _, classifier, detector, ship = demo.commands
    folder = demo.ROOT / demo.OUT
    assert f'pretrained={folder}/classifier/iter_1.pth' in detector
    assert ship[1:3] == (detector[1], f'{folder}/detector/iter_1.pth')
    assert 'work_dirs/demo_detector/ship/report.html' in capsys.readouterr().out
    assert ship[3:] == ('--format', 'litert', '--int8', 'full', '--to', 'UN', '--steps', '0', '--adapt-steps', '100',
                        '--num-samples', '128', '--out', f'{demo.OUT}/ship')


def test_a_failed_step_ends_the_demo():
    with pytest.raises(SystemExit, match='status 3'):
        load_tool('digits:demo_detector').run('fails', '-c', 'raise SystemExit(3)')
