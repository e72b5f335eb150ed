import subprocess
import sys
import textwrap

import pytest

from mmunorm.config.models import clear_build_errors
from mmunorm.utils import PreflightError

from ..tiny_runs import ROOT


def test_unregistered_types_are_one_line():
    with pytest.raises(PreflightError, match='NoSuchModel'), clear_build_errors():
        raise KeyError('NoSuchModel is not in the mmengine::model registry.\nPlease check')
    with pytest.raises(KeyError), clear_build_errors():
        raise KeyError('a key that a bug looked for')


def test_a_config_is_read_and_its_model_built_without_the_translator():
    """An empty module stands in for it: what imports one of its parts fails."""
    code = textwrap.dedent('''
        import sys, types
        sys.modules['mmunorm.translation'] = types.ModuleType('mmunorm.translation')
        from mmunorm.cli import preflight, resume, training
        from mmunorm.cli.arguments import load_config
        from mmunorm.config.models import build_model
        from mmunorm import fuse_norms
        fuse_norms(build_model(load_config('configs/digits/swin_un_classifier.py')).eval())
        assert not any(name.startswith('mmunorm.translation.') for name in sys.modules)
    ''')
    subprocess.run([sys.executable, '-c', code], check=True, cwd=ROOT)
