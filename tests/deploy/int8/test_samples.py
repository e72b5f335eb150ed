import pytest
import torch

from mmunorm.deploy.int8 import Samples
from mmunorm.utils import PreflightError

from . import models


def test_samples():
    pictures = list(models.pictures(7))
    batches = Samples(pictures, lambda part: (torch.stack(list(part)).numpy(), ), 3)
    assert len(batches) == 2 and [batch[0].shape for batch in batches] == [(3, 3, *models.SHAPE)] * 2
    assert batches[1][0].dtype == 'float32'
    with pytest.raises(PreflightError, match='got 7 for --batch 8'):
        Samples(pictures, lambda part: part, 8)
