
import pytest

from mmunorm.config.models import clear_build_errors
from mmunorm.utils import PreflightError


def test_unregistered_types_are_one_line():
    with pytest.raises(PreflightError, match='NoSuchModel'), clear_build_errors():
        raise KeyError('NoSuchModel is not in the mmengine::model registry.\nPlease check')
    with pytest.raises(PreflightError, match='metric should be one of'), clear_build_errors():
        raise KeyError("metric should be one of 'bbox', 'segm', but got foo.")
    with pytest.raises(KeyError), clear_build_errors():
        raise KeyError('a_key_that_a_bug_looked_for')
