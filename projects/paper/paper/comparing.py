"""Shared by the tools that train a recipe many times: arguments, the config of a run, and the training itself."""
from __future__ import annotations

import argparse
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mmengine.config import Config
from mmengine.registry import HOOKS, MODELS

from mmunorm.cli.arguments import add_config_arguments, out_folder, positive
from mmunorm.config.models import clear_build_errors
from mmunorm.config.presets import parse_preset, set_norm, slug
from mmunorm.norms import OfflineNorm
from mmunorm.utils import Interrupted, PreflightError, RunError

from .runs import ComparedRun, config_text, differing_keys, read_settings
from .training import train_all


def add_comparison_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that say how often and where a recipe is trained, and when a run has diverged."""
    parser.add_argument('--seeds', type=positive, default=3, help='runs of each, with seeds 0, 1, ... (default 3)')
    parser.add_argument('--out', required=True, type=_folder, help='folder for the runs and the results')
    parser.add_argument('--jobs', type=positive, default=1,
                        help='runs at a time (default 1); if there is a GPU, they all share it')
    parser.add_argument('--fail-factor', type=float, default=3.0,
                        help='a step is bad if its loss exceeds so many times the starting loss (default 3)')
    parser.add_argument('--fail-patience', type=int, default=10,
                        help='number of bad steps in a row that ends a run (default 10)')
    add_config_arguments(parser, norm=False)


def _folder(text: str) -> Path:
    if not text:  # it would be the working directory
        raise argparse.ArgumentTypeError("must be a folder, got ''")
    return Path(text)


def parse_presets(option: str, texts: Sequence[str], *arguments) -> dict[str, dict]:
    """The configs of all texts of an option, see :func:`parse_preset`, by name."""
    named = dict(parse_preset(text, *arguments) for text in texts)
    if len({slug(name) for name in named}) < len(texts):
        raise PreflightError(f'{option}: two have the same name, or names that give the same folder.')
    return named


def check_initial_weights(cfg: Config, path: str, options: Mapping | None) -> None:
    """Raises a PreflightError if the recipe or an option of `--cfg-options` names weights that runs do not load."""
    for option, value in (options or {}).items():
        if value is not None and option in ('pretrained', 'model.backbone.init_cfg.checkpoint'):
            raise PreflightError(f'--cfg-options {option} is not for a comparison: name the backbone weights '
                                 'to start from with --pretrained.')
    if cfg.get('load_from') is not None:
        raise PreflightError(f'{path} has load_from={cfg.load_from!r}, which these runs would not '
                             'load: they resume from their own checkpoints. Name backbone weights with '
                             '--pretrained.')


def with_norm(base: Config, name: str, norm_cfg: dict, steps: int) -> Config:
    """A copy of the recipe `base` with another norm; `name` is for the error.

    Raises:
        PreflightError: the norm is invalid, or `steps` are too few for it.
    """
    cfg = Config(base.to_dict())
    set_norm(cfg, norm_cfg)
    cls = MODELS.get(norm_cfg['type'])
    if issubclass(cls, OfflineNorm):
        arguments = {key: value for key, value in cfg.model.backbone.norm_cfg.items() if key != 'type'}
        with clear_build_errors():
            norm = cls(1, **arguments)
        if problem := norm.start_run(resumed=False, steps=steps):
            raise PreflightError(f'--norms {name}: {problem}')
    return cfg


def seeded(recipe: Config, run: ComparedRun, args: argparse.Namespace) -> Config:
    """The config of a run: the recipe with its seed, and a hook that stops a diverged run.

    Raises:
        PreflightError: `--fail-factor` or `--fail-patience` is wrong.
    """
    cfg = Config(recipe.to_dict())
    cfg.randomness = {**(cfg.get('randomness') or {}), 'seed': run.seed}
    imports = cfg.get('custom_imports') or {}
    modules = [*imports.get('imports', ()), 'projects.paper.paper']
    cfg.custom_imports = dict(imports, imports=list(dict.fromkeys(modules)))
    cfg.custom_hooks = [*(cfg.get('custom_hooks') or []),
                        checked_hook('--fail-factor and --fail-patience', type='DivergenceHook',
                                     patience=args.fail_patience, factor=args.fail_factor)]
    return cfg


def checked_hook(options: str, **cfg) -> dict:
    """The config of a hook. Raises a PreflightError before any run starts if the hook config is invalid."""
    try:
        HOOKS.build(cfg)
    except (TypeError, ValueError) as error:
        raise PreflightError(f'{options}: {error}.') from None
    return cfg


def check_settings(configs: Mapping[ComparedRun, Config]) -> None:
    """Raises a PreflightError if the folder of one of these runs has a run with other settings."""
    for run, cfg in configs.items():
        if not run.config.exists():
            if run.has_begun():
                raise PreflightError(f'{run.work_dir} has a run, and {run.config} with its settings is missing: choose '
                                     'another --out, or remove that folder.')
            continue
        if run.config.read_text() == config_text(cfg):
            continue
        try:
            keys = differing_keys(read_settings(run.config), cfg.to_dict())
        except (ValueError, SyntaxError, AttributeError) as error:
            raise PreflightError(f'cannot compare {run.config} with the settings of this call: {error}.') from None
        if keys:
            raise PreflightError(f'{run.work_dir} was trained with other settings ({", ".join(keys[:5])}): '
                                 'choose another --out, or remove that folder and the config beside it.')


def train_and_write(configs: Mapping[ComparedRun, Config], args: argparse.Namespace,
                    write: Callable[[dict[ComparedRun, str]], list[Path]]) -> None:
    """Trains the unfinished runs in the order of `configs`, and prints all results.

    `write` takes the errors by run, writes the results so far, and returns the files, the table first.

    Raises:
        Interrupted: by Ctrl+C.
        RunError: a run crashed.
    """
    out_folder(args.out)
    pending = {run: cfg for run, cfg in configs.items() if run.result() is None}
    if len(pending) < len(configs):
        print(f'{len(configs) - len(pending)} of {len(configs)} runs are finished already.')
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        errors = train_all(pending, args.jobs, write, args.trust_checkpoint)
    except KeyboardInterrupt:
        raise Interrupted('interrupted; run the same command to continue.') from None
    written = write(errors)
    print(written[0].read_text())
    print(f'written: {", ".join(map(str, written))}')
    if errors:
        raise RunError(f'{len(errors)} of {len(configs)} runs are not finished, see above; run the '
                       'same command to retry them.')
