import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
# Without OpenMMLab, mmunorm is imported in a third of the time.
CODE = ("import runpy, sys; sys.modules.update(dict.fromkeys(['mmengine', 'mmcv', 'mmdet', 'mmpretrain'])); "
        "runpy.run_module('tests.norms.kernels.{}', run_name='__main__')")


@pytest.mark.slow
@pytest.mark.skipif(find_spec('triton') is None, reason='Triton is not installed')
@pytest.mark.parametrize('module,interpret,words', [
    ('triton_cases', '1', 'all cases agree'),
    ('triton_compile', '0', 'all kernels compile'),
    pytest.param('triton_cases', '0', 'all cases agree', id='on a GPU', marks=pytest.mark.skipif(
        not torch.cuda.is_available(), reason='there is no GPU')),
])
def test_every_kernel(module, interpret, words, tmp_path):
    """In its own process: Triton's interpreter is chosen once, when kernels are defined."""
    env = dict(os.environ, TRITON_INTERPRET=interpret, TRITON_CACHE_DIR=str(tmp_path))
    result = subprocess.run([sys.executable, '-c', CODE.format(module)], text=True, cwd=ROOT, env=env,
                            capture_output=True, timeout=600)
    if result.returncode == 77:
        pytest.skip(result.stdout.splitlines()[-1])
    assert result.returncode == 0, result.stdout[-1000:] + result.stderr[-3000:]
    assert words in result.stdout
