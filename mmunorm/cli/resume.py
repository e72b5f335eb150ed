"""`--resume`: finds the checkpoint from which an interrupted run continues."""
from __future__ import annotations

import os
import re
import zipfile
from itertools import takewhile
from pathlib import Path

from mmengine.config import Config
from mmengine.runner import find_latest_checkpoint

from ..checkpoints.loading import check_checkpoint, read_checkpoint
from ..config.pretrained import pretrained_path
from ..utils import PreflightError, warn

_CHECKPOINT = re.compile(r'(?:epoch|iter)_(\d+)\.pth')


def set_resume(cfg: Config, resume: str | None) -> None:
    """Applies `--resume`: a checkpoint, 'auto' for the latest in the work directory, or None.

    A resumed run takes all its weights from the checkpoint, so that pretrained weights need not exist, and its seed if
    the config has none. If the work directory has no whole checkpoint, a warning says that the run starts at the
    beginning. If it has one and the run is not resumed, a warning says that it will be overwritten.
    """
    if resume == 'auto' or resume is None and cfg.get('resume') and cfg.get('load_from') is None:
        source, damaged = find_resumable(cfg.work_dir)
        where = 'the run starts at the beginning' if source is None else f'resuming from {source}'
        if damaged:
            warn(f'{damaged[0]} was not written to its end: {where}.')
        elif source is None and os.path.isdir(cfg.work_dir):
            warn(f'there is no checkpoint in {cfg.work_dir} to resume from: {where}.')
        # With resume=True and nothing to load, mmengine would search itself, and take a refused checkpoint.
        cfg.resume = source is not None
        cfg.load_from = source or cfg.get('load_from')
    elif resume is not None:
        cfg.resume, cfg.load_from = True, resume
    elif not cfg.get('resume') and (old := find_resumable(cfg.work_dir)[0]):
        warn(f'{old} and others are of an earlier run, and this one will overwrite them; --resume goes on from there.')
    source = cfg.get('load_from')
    if source is None:
        return
    check_checkpoint(source, folder=_reads_folders(cfg))
    if pretrained_path(cfg) is not None:
        cfg.model.backbone.init_cfg = None
    if not cfg.get('resume') or os.path.isdir(source):
        return
    meta = read_checkpoint(source).get('meta') or {}
    if 'iter' not in meta:
        raise PreflightError(f'{source} cannot be resumed: it has weights, and nothing of a training run. To start '
                             f'from it, add --cfg-options load_from={source}.')
    randomness = cfg.get('randomness') or {}
    if randomness.get('seed') is None:  # mmengine builds the sampler before it resumes
        cfg.randomness = {**randomness, 'seed': meta.get('seed')}


def _reads_folders(cfg: Config) -> bool:
    """Whether the run's checkpoints may be folders, as those of sharded training are."""
    strategy = (cfg.get('strategy') or {}).get('type')
    return 'runner_type' in cfg and strategy not in (None, 'SingleDeviceStrategy', 'DDPStrategy')


def find_resumable(work_dir: str) -> tuple[str | None, list[str]]:
    """Finds the checkpoint from which a run in `work_dir` continues, and the damaged ones that it cannot use.

    mmengine writes a checkpoint, and then its name into `last_checkpoint`. If a run is killed in between, its newest
    checkpoint is not the named one. If it is killed while it writes a checkpoint, that checkpoint is damaged.

    The named checkpoint counts, unless a whole one has both a higher number and a later time; times alone do not
    survive a copy. If the work directory has a checkpoint of the named one's file name, it counts in its place: the
    folder was copied. Else that other folder counts, as CheckpointHook's `out_dir`.

    Returns:
        The path of the checkpoint or None, and the damaged checkpoints that would have come before it.
    """
    text = find_latest_checkpoint(work_dir) or ''
    if '://' in text:  # a remote path is not checked
        return text, []
    candidates, named = _checkpoints(Path(work_dir)), None
    if text:
        named = next((path for path in (Path(work_dir, Path(text).name), Path(text)) if path.exists()), None)
        candidates = candidates or _checkpoints(Path(text).parent)
    order = sorted(candidates | ({named} - {None}), key=lambda path: _precedence(path, named), reverse=True)
    damaged = list(takewhile(lambda path: not is_whole(path), order))
    found = str(order[len(damaged)]) if len(damaged) < len(order) else None
    return found, list(map(str, damaged))


def _checkpoints(folder: Path) -> set[Path]:
    found = folder.iterdir() if folder.is_dir() else ()
    return {path for path in found if _CHECKPOINT.fullmatch(path.name) and path.exists()}


def _precedence(path: Path, named: Path | None) -> tuple[int, int]:
    """A sort key; the largest is tried first: later than the named one, named, lower numbers, others by time."""
    if path == named:
        return 2, 0
    number, time = int(_CHECKPOINT.fullmatch(path.name)[1]), path.stat().st_mtime_ns
    if match := named and _CHECKPOINT.fullmatch(named.name):
        if number < int(match[1]):
            return 1, number
        if time > named.stat().st_mtime_ns and path.is_file():  # only `last_checkpoint` shows that a folder is whole
            return 3, number
    return 0, time


def is_whole(path: str | os.PathLike) -> bool:
    """Whether a checkpoint ends as torch.save ends it; a folder, which sharded training writes, counts as whole."""
    return os.path.isdir(path) or zipfile.is_zipfile(path)
