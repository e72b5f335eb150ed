"""`--resume`: the checkpoint that it finds, and its changes of the config."""
import os
from pathlib import Path

import pytest
import torch
from mmengine.config import Config

from mmunorm.cli.resume import find_resumable, set_resume
from mmunorm.utils import PreflightError


def save(folder, *names):
    """Checkpoints, the latest last."""
    folder.mkdir(exist_ok=True)
    for time, name in enumerate(names, start=100):
        torch.save({}, folder / f'{name}.pth')
        os.utime(folder / f'{name}.pth', (time, time))
    return folder


def found(work_dir, named=None):
    if named is not None:
        (work_dir / 'last_checkpoint').write_text(str(named))
    path, damaged = find_resumable(str(work_dir))
    return path and Path(path).relative_to(work_dir.parent).as_posix(), [Path(path).stem for path in damaged]


def test_resumable(tmp_path):
    assert find_resumable(tmp_path / 'nowhere') == (None, [])
    save(tmp_path, 'last_good', 'best_accuracy_epoch_3')
    assert find_resumable(tmp_path) == (None, [])  # neither can be resumed
    (tmp_path / 'last_checkpoint').write_text('s3://bucket/epoch_1.pth')
    assert find_resumable(tmp_path) == ('s3://bucket/epoch_1.pth', [])


def test_resumable_of_another_folder(tmp_path):
    """CheckpointHook's `out_dir`, of which only `last_checkpoint` knows."""
    work_dir, other = save(tmp_path / 'w'), save(tmp_path / 'other', 'iter_5', 'iter_10')
    assert found(work_dir, other / 'iter_5.pth') == ('other/iter_10.pth', [])
    # With checkpoints of its own, only the named one is considered elsewhere.
    save(work_dir, 'iter_3')
    assert found(work_dir, other / 'iter_5.pth') == ('other/iter_5.pth', [])


def test_resumable_after_a_copy(tmp_path):
    # The times are those of the copy, in any order.
    work_dir = save(tmp_path / 'a', 'epoch_36', 'epoch_9', 'epoch_35', 'epoch_1')
    assert found(work_dir, work_dir / 'epoch_36.pth') == ('a/epoch_36.pth', [])
    (work_dir / 'epoch_36.pth').write_bytes(b'PK')
    os.utime(work_dir / 'epoch_36.pth', (100, 100))
    assert found(work_dir) == ('a/epoch_35.pth', ['epoch_36'])
    # A fork is independent, and so is a renamed folder.
    fork = save(tmp_path / 'b', 'epoch_1')
    assert found(fork, work_dir / 'epoch_1.pth') == ('b/epoch_1.pth', [])
    assert found(fork, tmp_path / 'gone/epoch_1.pth') == ('b/epoch_1.pth', [])
    assert found(fork, tmp_path / 'gone/epoch_7.pth') == ('b/epoch_1.pth', [])


def test_resumable_next_to_the_named_one(tmp_path):
    work_dir = save(tmp_path / 'w', 'epoch_9', 'epoch_1', 'epoch_2', 'epoch_3')
    assert found(work_dir, work_dir / 'epoch_2.pth') == ('w/epoch_3.pth', [])
    assert found(work_dir, work_dir / 'epoch_3.pth') == ('w/epoch_3.pth', [])
    (work_dir / 'epoch_3.pth').write_bytes(b'PK')
    assert found(work_dir, work_dir / 'epoch_2.pth') == ('w/epoch_2.pth', ['epoch_3'])
    # Killed while a checkpoint was written, or before its name was.
    whole = (work_dir / 'epoch_2.pth').read_bytes()
    for size in (0, 100, len(whole) // 2, len(whole) - 1):
        (work_dir / 'epoch_3.pth').write_bytes(whole[:size])
        assert found(work_dir, '') == ('w/epoch_2.pth', ['epoch_3'])
    # Only its name in `last_checkpoint` shows that a folder is whole.
    (work_dir / 'epoch_4.pth').mkdir()
    assert found(work_dir, work_dir / 'epoch_2.pth') == ('w/epoch_2.pth', ['epoch_3'])
    assert found(work_dir, work_dir / 'epoch_4.pth') == ('w/epoch_4.pth', [])


def config(tmp_path, **others):
    init_cfg = dict(type='Pretrained', checkpoint='missing.pth')
    return Config(dict(work_dir=str(tmp_path), model=dict(backbone=dict(init_cfg=init_cfg)), **others))


def test_a_run_from_the_start_keeps_its_pretrained_weights_and_a_continued_one_does_not_need_them(tmp_path, capsys):
    for folder, resume, note in (('', None, ''), ('new', 'auto', ''), ('', 'auto', 'to resume from: the run starts')):
        cfg = config(tmp_path / folder)
        set_resume(cfg, resume)
        assert cfg.model.backbone.init_cfg.checkpoint == 'missing.pth' and not cfg.get('resume')
        warning = capsys.readouterr().err
        assert note in warning and bool(note) == bool(warning)
    checkpoint = str(tmp_path / 'epoch_1.pth')
    torch.save({}, checkpoint)
    with pytest.raises(PreflightError, match=f'cannot be resumed: .*--cfg-options load_from={checkpoint}'):
        set_resume(config(tmp_path), checkpoint)
    torch.save(dict(meta=dict(iter=1)), checkpoint)
    set_resume(config(tmp_path), None)
    assert 'epoch_1.pth and others are of an earlier run, and this one will overwrite' in capsys.readouterr().err
    for resume in ('auto', checkpoint):
        cfg = config(tmp_path, load_from='other.pth')
        set_resume(cfg, resume)
        assert (cfg.resume, cfg.load_from, cfg.model.backbone.init_cfg) == (True, checkpoint, None)
    with pytest.raises(PreflightError, match='no checkpoint .*gone.pth'):
        set_resume(config(tmp_path), str(tmp_path / 'gone.pth'))


@pytest.mark.parametrize('pointer', ['epoch_1.pth', 'epoch_9.pth'])
def test_mmengine_does_not_resume_a_refused_checkpoint(tmp_path, pointer, capsys):
    """It reads `last_checkpoint` itself where a run resumes from nothing in particular."""
    (tmp_path / 'epoch_1.pth').write_bytes(b'PK half a file')
    (tmp_path / 'last_checkpoint').write_text(str(tmp_path / pointer))
    (tmp_path / 'start.pth').touch()
    cfg = config(tmp_path, load_from=str(tmp_path / 'start.pth'), randomness=dict(seed=0))
    set_resume(cfg, 'auto')
    assert 'the run starts at the beginning' in capsys.readouterr().err
    assert (cfg.resume, cfg.load_from) == (False, str(tmp_path / 'start.pth'))


def test_a_config_without_a_seed_uses_the_checkpoints(tmp_path):
    checkpoint = str(tmp_path / 'epoch_1.pth')
    torch.save(dict(meta=dict(seed=17, iter=1), state_dict={}), checkpoint)
    for randomness, seed in ((None, 17), (dict(seed=None, deterministic=True), 17), (dict(seed=0), 0)):
        cfg = config(tmp_path, **({} if randomness is None else dict(randomness=randomness)))
        set_resume(cfg, checkpoint)
        assert cfg.randomness == dict(randomness or {}, seed=seed)
    # A run that only loads weights is another run.
    cfg = config(tmp_path, load_from=checkpoint)
    set_resume(cfg, None)
    assert 'randomness' not in cfg


def test_a_folder_is_a_checkpoint_of_sharded_training_alone(tmp_path):
    folder = tmp_path / 'epoch_2.pth'
    folder.mkdir()
    (tmp_path / 'last_checkpoint').write_text(str(folder))
    for others in ({}, dict(runner_type='FlexibleRunner'),
                   dict(runner_type='FlexibleRunner', strategy=dict(type='DDPStrategy'))):
        for resume, load_from in ((None, str(folder)), ('auto', None), (str(folder), None)):
            with pytest.raises(PreflightError, match='epoch_2.pth is a folder'):
                set_resume(config(tmp_path, load_from=load_from, **others), resume)
    for resume in ('auto', str(folder)):
        cfg = config(tmp_path, runner_type='FlexibleRunner', strategy=dict(type='FSDPStrategy'))
        set_resume(cfg, resume)
        assert (cfg.resume, cfg.load_from) == (True, str(folder))
