import os
import subprocess
import sys
from importlib.util import find_spec

import pytest


@pytest.mark.slow
@pytest.mark.skipif(find_spec('triton') is None, reason='Triton is not installed')
def test_every_kernel_equals_the_reference():
    """In its own process: Triton's interpreter is chosen when kernels are defined, and for good."""
    result = subprocess.run([sys.executable, '-m', 'tests.norms.kernels.triton_cases'], text=True,
                            env=dict(os.environ, TRITON_INTERPRET='1'), capture_output=True, timeout=600)
    assert result.returncode == 0, result.stderr[-3000:]
    assert 'all cases agree' in result.stdout
