"""mmpretrain's own `train.py` and `test.py`, with the lines of README in a config."""
import subprocess
import sys
from pathlib import Path

import mmpretrain
import pytest

from . import processes, tiny_runs

pytestmark = pytest.mark.slow
CONFIG = """
_base_ = ['{base}']
custom_imports = dict(imports=['mmunorm'])
custom_hooks = [dict(type='OfflineNormHook')]
train_cfg = dict(max_epochs=2, val_interval=1)
"""


def test_trains_resumes_and_tests(tmp_path):
    """mmdet's train.py runs in test_readme.py; its test.py imports mmcv's operators before it reads the config."""
    tools = Path(mmpretrain.__file__).parent / '.mim/tools'
    config = tmp_path / 'config.py'
    config.write_text(CONFIG.format(base=tiny_runs.write_classifier(tmp_path)))
    # The stock tools ask for workers that persist.
    workers = [f'{split}_dataloader.num_workers=1' for split in ('train', 'val', 'test')]
    options = ['--work-dir', tmp_path / 'w', '--cfg-options', *workers]
    # In a process that has imported nothing: the config brings mmunorm.
    trained = subprocess.run([sys.executable, tools / 'train.py', config, *options], capture_output=True, text=True)
    assert trained.returncode == 0, trained.stderr
    log = next((tmp_path / 'w').glob('*/*.log')).read_text()
    assert 'OfflineNormHook' in log and 'never leaves its warm-up' not in log
    last, first = sorted((tmp_path / 'w').glob('*.pth'), reverse=True)
    steps = tiny_runs.checkpoint(last)['state_dict']['backbone.norm1.num_batches_tracked']

    last.unlink()
    (tmp_path / 'w/last_checkpoint').write_text(str(first))
    assert processes.run_tool(tools / 'train.py', config, '--resume', *options) == [0]
    assert tiny_runs.checkpoint(last)['state_dict']['backbone.norm1.num_batches_tracked'] == steps
    assert processes.run_tool(tools / 'test.py', config, last, *options) == [0]
    metrics = max((tmp_path / 'w').glob('*/*.json'), key=lambda path: path.stat().st_mtime).read_text()
    assert 'accuracy/top1' in metrics
