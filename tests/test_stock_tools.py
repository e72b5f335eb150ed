"""mmdet's and mmpretrain's own `train.py` and `test.py`, with what README says to add to a config."""
import subprocess
import sys
from pathlib import Path

import mmdet
import mmpretrain
import pytest
from mmengine.config import Config

from . import processes, tiny_runs

pytestmark = pytest.mark.slow
CONFIG = """
_base_ = ['{base}']
custom_imports = dict(imports=['mmunorm'])
custom_hooks = [dict(type='OfflineNormHook')]
model = dict(backbone=dict(norm_cfg=dict(warmup_iters=1)))
{schedule}
"""
SCHEDULES = dict(
    maskrcnn='train_cfg = dict(max_iters=2, val_interval=1)',
    classifier='train_cfg = dict(max_epochs=2, val_interval=1)')


@pytest.mark.parametrize('package, task', [
    pytest.param(mmdet, 'maskrcnn', marks=pytest.mark.grid), (mmpretrain, 'classifier')])
def test_trains_resumes_and_tests(tmp_path, package, task):
    tools = Path(package.__file__).parent / '.mim/tools'
    base = tiny_runs.ROOT / f'configs/digits/swin_un_{task}.py'
    config = tmp_path / 'config.py'
    config.write_text(CONFIG.format(base=base, schedule=SCHEDULES[task]))
    # The stock tools ask for workers that persist.
    options = [option.replace('num_workers=0', 'num_workers=1')
               for option in tiny_runs.tiny_data(Config.fromfile(base), tmp_path / 'digits')
               if not option.startswith(('train_cfg', 'pretrained'))]
    options += ['model.backbone.init_cfg=None'] * (task == 'maskrcnn')
    options = ['--work-dir', tmp_path / 'w', '--cfg-options', *options]

    if task == 'classifier':  # in a process that has imported nothing: the config brings mmunorm
        trained = subprocess.run([sys.executable, tools / 'train.py', config, *options], capture_output=True,
                                 text=True)
        assert trained.returncode == 0, trained.stderr
    else:
        assert processes.run_tool(tools / 'train.py', config, *options) == [0]
    log = next((tmp_path / 'w').glob('*/*.log')).read_text()
    assert 'OfflineNormHook' in log and 'never leaves its warm-up' not in log
    last, first = sorted((tmp_path / 'w').glob('*.pth'), reverse=True)
    steps = tiny_runs.checkpoint(last)['state_dict']['backbone.norm3.num_batches_tracked']

    last.unlink()
    (tmp_path / 'w/last_checkpoint').write_text(str(first))
    assert processes.run_tool(tools / 'train.py', config, '--resume', *options) == [0]
    assert tiny_runs.checkpoint(last)['state_dict']['backbone.norm3.num_batches_tracked'] == steps

    # mmdet's test.py imports mmcv's operators before it reads the config, which an mmcv without a compiler lacks.
    assert processes.run_tool(tools / 'test.py', config, last, *options) == [0]
    metrics = max((tmp_path / 'w').glob('*/*.json'), key=lambda path: path.stat().st_mtime).read_text()
    assert ('coco/bbox_mAP' if task == 'maskrcnn' else 'accuracy/top1') in metrics
