import os
import pty
import sys

from mmunorm.deploy.formats.base import silent
from mmunorm.deploy.progress import progress, stage


def test_a_terminal_shows_the_stage_though_libraries_are_silent(monkeypatch):
    master, slave = pty.openpty()
    with open(slave, 'w') as terminal:
        monkeypatch.setattr(sys, 'stderr', terminal)
        with progress('exporting to X'), silent():
            stage('calibrating')
        shown = os.read(master, 10000).decode()
    os.close(master)
    assert 'exporting to X: calibrating, 00:00' in shown


def test_a_pipe_shows_nothing(capfd):
    with progress('exporting to X'):
        stage('calibrating')
    assert capfd.readouterr() == ('', '')
