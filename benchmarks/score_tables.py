"""Definitions, by name, of the tables of training scores for write_scores.py.

- `labels`: the headers of the first columns.
- `rows`: by label, or tuple of labels, the values that select trainings.
- `columns`: by header the metric, its format (`form`, `digits`, `missing`), and further values that select trainings.
  A row may have the metric instead, as `measured`.
- `where`: values that select trainings for the whole table.

A value is that of a field of scores.jsonl, or of one of its options.
"""
TOP1, BOX, MASK = 'accuracy/top1', 'coco/bbox_mAP', 'coco/segm_mAP'
BLEU, CHRF, LOSS = 'translation/BLEU', 'translation/chrF', 'loss'

PLAIN = dict(options={})
AVX512 = dict(cpu='AMD EPYC, AVX512', precision='bfloat16')
INTEL_BF16 = dict(cpu='Intel(R) Xeon(R) Processor, AVX512', precision='bfloat16')
INTEL = dict(cpu='Intel(R) Xeon(R) Processor, AVX512', precision='float32')
STRESSED = dict(options=dict(condition='stressed'))

# The norms of the comparisons, by their names in the tables.
FOLDING = {'BN': 'BN', 'RepBN': 'RepBN', 'MABN': 'MABN', 'PN*': 'PN*', 'UN without its filter': 'UN-nofilter',
           'UN': 'UN', 'UN+': 'UN+'}
VARIANTS = {'UN, `eta=0.`': 'eta', 'UN, `centered=True`': 'mean', 'UN+ with `eta=1.`': 'eta1'}


def norms(names):
    return {label: dict(norm=name) for label, name in names.items()}


def same(*names):
    return norms({name: name for name in names})


FULL_INTEGER = 'LiteRT INT8, full-integer'


def mean(metric, form='mean', **values):
    digits = 3 if metric in (BOX, MASK, 'enhancement/SSIM') else 2
    return dict(metric=metric, digits=digits, form=form, **values)


def by_seed(metric, count):
    return {'mean ± std': mean(metric),
            **{f'seed {seed}': mean(metric, seed=seed, missing='') for seed in range(count)}}


def boxes():
    """Mean and scores of box AP, and the mean of mask AP."""
    return {'box AP': mean(BOX), **{f'seed {seed}': mean(BOX, seed=seed, missing='') for seed in range(3)},
            'mask AP': mean(MASK)}


TABLES = {
    'main': dict(
        labels=[''], where=PLAIN,
        rows=same('LN', 'BN', 'RepBN', 'UN', 'UN+'),
        columns={'Swin, top-1': mean(TOP1, 'count', experiment='swin_wide_start'),
                 'T2T-ViT, top-1': mean(TOP1, 'count', experiment='t2t', steps=752, **AVX512),
                 'Mask R-CNN with Swin, box AP': mean(BOX, 'count', experiment='maskrcnn_wide_start'),
                 'Swin on photographs, top-1': mean(TOP1, 'count', experiment='photographs_wide_start', **INTEL_BF16)}),
    'digits': dict(
        labels=['config', 'val'], where=PLAIN,
        rows={('`swin_*_classifier.py`', 'top-1'): dict(experiment='swin_wide_start', measured=mean(TOP1)),
              ('`t2t_un_classifier.py`', 'top-1'): dict(experiment='t2t', steps=752, **AVX512, measured=mean(TOP1)),
              ('`swin_*_maskrcnn.py`', 'box AP'): dict(experiment='maskrcnn_wide_start', measured=mean(BOX)),
              ('`swin_*_maskrcnn.py` ', 'mask AP'): dict(experiment='maskrcnn_wide_start', measured=mean(MASK))},
        columns={norm: dict(norm=norm) for norm in ('LN', 'UN')}),
    # docs/results/accuracy.md and benchmarks/NOTES.md
    'swin_wide_start': dict(
        labels=['top-1'], where=dict(experiment='swin_wide_start', **PLAIN),
        rows=same('LN', 'RMSN', 'BN', 'RepBN', 'UN', 'UN+'), columns=by_seed(TOP1, 3)),
    'maskrcnn_wide_start': dict(
        labels=['norm'], where=dict(experiment='maskrcnn_wide_start'), rows=same('LN', 'BN', 'UN', 'UN+'),
        columns=boxes()),
    't2t': dict(
        labels=['top-1'], where=dict(experiment='t2t', **PLAIN, **AVX512),
        rows=norms({'LN': 'LN', **FOLDING, **VARIANTS}), columns=by_seed(TOP1, 3)),
    'stress': dict(
        labels=['top-1, seeds 0 to 2'], where=dict(experiment='swin', steps=752, **AVX512), rows=same('UN', 'UN+'),
        columns={**{f'calm, seed {seed}': mean(TOP1, seed=seed, **PLAIN) for seed in range(3)},
                 'stressed, mean ± std': mean(TOP1, **STRESSED),
                 **{f'seed {seed}': mean(TOP1, seed=seed, **STRESSED) for seed in range(3)}}),
    'after_outlier': dict(
        labels=['on an outlier step, the running statistic takes'], where=dict(experiment='swin_after_outlier'),
        rows={"the step's own statistic, as in the paper": dict(running_statistic="the step's own"),
              'the GM of the record': dict(running_statistic='the GM'), 'nothing': dict(running_statistic='nothing')},
        columns={'mean of the last ten tests': dict(metric='last ten tests, mean', digits=1),
                 'lowest of them': dict(metric='last ten tests, lowest', digits=1),
                 'outlier steps of the first norm': dict(metric='outlier steps, first norm', digits=0),
                 'of all norms': dict(metric='outlier steps, all norms', digits=0),
                 'at the end, on all images': dict(metric=TOP1, digits=1)}),
    'stress_intel': dict(
        labels=['top-1, seed 0'], where=dict(experiment='swin', seed=0, **INTEL),
        rows=same('LN', 'BN', 'MABN', 'PN*', 'UN', 'UN-nofilter'),
        columns={'calm': mean(TOP1, **PLAIN), 'stressed': mean(TOP1, **STRESSED)}),
    'swin_intel': dict(
        labels=['top-1'], where=dict(experiment='swin', **PLAIN, **INTEL),
        rows={**same('LN', 'BN', 'MABN'), 'MABN, alpha 0.98': dict(norm='alpha0.98'),
              **same('PN*', 'PN', 'UN', 'UN-nofilter', 'RepBN', 'PRepBN', 'RMSN', 'DyT', 'NoNorm')},
        columns={'mean ± std of 3 seeds': mean(TOP1)}),
    # projects/translation/RESULTS.md
    'translation': dict(
        labels=['norm'], where=dict(experiment='translation', **PLAIN),
        rows=norms({'LN': 'LN', 'UN': 'UN', 'UN with its filter': 'UN-filter'}),
        columns={'BLEU after 2,000 steps': mean(BLEU, steps=2000), 'BLEU': mean(BLEU, steps=4000),
                 'chrF': mean(CHRF, steps=4000), 'loss': mean(LOSS, steps=4000)}),
    'translation_soon': dict(
        labels=['norm', 'paper, BLEU'],
        where={'experiment': 'translation', 'steps': 1500, 'optim_wrapper.optimizer.lr': None},
        rows={(label, paper): dict(norm=norm) for label, paper, norm in (
            ('LN', '35.3', 'LN'), ('BN', '31.1', 'BN'), ('UN', '35.4', 'UN'), ('UN with its filter', '', 'UN-filter'),
            ('RMSN', '35.3', 'RMSN'), ('PN', '35.3', 'PN'), ('MABN', '35.4', 'MABN'), ('PN*', '35.0', 'PN*'),
            ('NoNorm', 'FAIL', 'NoNorm'), ('UN+', '', 'UN+'))},
        columns={'BLEU': mean(BLEU), 'chrF': mean(CHRF), 'loss': mean(LOSS)}),
    'translation_statistics': dict(
        labels=['validation loss'], where=dict(experiment='translation_statistics'),
        rows={'of the batch': dict(statistics='batch'), 'running': dict(statistics='running')},
        columns={norm: dict(metric='validation loss', digits=3, norm=norm)
                 for norm in ('LN', 'RMSN', 'BN', 'UN', 'UN+', 'PN', 'MABN')}),
    'translation_averages': dict(
        labels=["row of the paper's table", '`--norms`', 'paper'], where=dict(experiment='translation_averages'),
        rows={(label, f'`{norm}`', paper): dict(norm=norm.partition('=')[0]) for label, norm, paper in (
            ('UN, alpha 0.9', 'UN', '35.4'),
            ('without GM', 'noGM=UN,forward_average=current', '34.5'),
            ('without AM', 'noAM=UN,backward_average=current', '35.3'),
            ('without alpha in the backward pass', 'noalpha=UN,backward_momentum=False', '18.3'),
            ('GM alone', 'GMalone=UN,backward_average=current,backward_momentum=False', 'FAIL'),
            ('alpha 0.8', 'alpha0.8=UN,alpha=0.8', '35.4'),
            ('alpha 0.7', 'alpha0.7=UN,alpha=0.7', '35.3'),
            ('alpha 0.6', 'alpha0.6=UN,alpha=0.6', 'FAIL'))},
        columns={'BLEU': mean(BLEU), 'chrF': mean(CHRF), 'loss': mean(LOSS)}),
    'translation_depth_long': dict(
        labels=['scheme'], where=dict(experiment='translation_depth', steps=1000),
        rows={scheme: dict(scheme=scheme) for scheme in ('PostNorm', 'PreNorm', 'DeepNorm', 'BranchNorm')},
        columns={f'{norm}: {header}': dict(metric=metric, digits=digits, norm=norm) for norm in ('LN', 'UN')
                 for header, metric, digits in (('loss', LOSS, 2), ('BLEU', BLEU, 1), ('chrF', CHRF, 1))}),
    'translation_many': dict(
        labels=['scheme', 'text'], where=dict(experiment='translation_many'),
        rows={(scheme, text): dict(scheme=scheme, text=text) for scheme in ('BranchNorm', 'DeepNorm')
              for text in ('clean', 'noisy')},
        columns={'BLEU, mean': dict(metric=BLEU, digits=2), 'chrF, mean': dict(metric=CHRF, digits=1),
                 **{f'BLEU, {code}': dict(metric=f'{BLEU}/{code}', digits=2) for code in ('de', 'fr', 'it')}}),
    # projects/deep/RESULTS.md
    'depth': dict(
        labels=['scheme', 'norm'], where=dict(experiment='depth'),
        rows={(label, norm): dict(norm=norm, scheme=label.partition(',')[0], **({'T': T} if T else {}))
              for norm in ('LN', 'UN') for label, T in (
                  ('PostNorm', 0), ('PreNorm', 0), ('DeepNorm', 0), ('BranchNorm, T = 25', 25),
                  ('BranchNorm, T = 100', 100), ('LayerScale', 0))},
        columns={f'{layers} layers': mean(TOP1, layers=layers) for layers in (12, 24, 48, 96)}),
    # projects/photographs/RESULTS.md
    'photographs': dict(
        labels=['val top-1', 'machine'], where=dict(steps=1504),
        rows={(norm, machine): dict(norm=norm, **wanted) for machine, wanted, names in (
            ('Xeon', dict(experiment='photographs_wide_start', **INTEL_BF16), ('LN', 'BN', 'RepBN', 'UN', 'UN+')),
            ('EPYC', dict(experiment='photographs_wide_start', **PLAIN, **AVX512),
             ('LN', 'RMSN', 'DyT', 'Derf', 'BN', 'UN', 'UN+')),
            ('Xeon, started with 0.02', dict(experiment='photographs'), ('LN', 'BN', 'RepBN', 'UN', 'UN+')))
            for norm in names},
        columns=by_seed(TOP1, 3)),
    'photographs_hard': dict(
        labels=['val top-1, seed 0'], where=dict(seed=0, **AVX512),
        rows={**same('LN', 'BN', 'UN', 'UN+'), 'UN, `window=16`': dict(norm='w16')},
        columns={'calm': mean(TOP1, experiment='photographs_wide_start', missing='', **PLAIN),
                 'stressed': mean(TOP1, experiment='photographs_wide_start', missing='', **STRESSED),
                 'batches of 4, one epoch': mean(TOP1, experiment='photographs_batch4')}),
    'shifted_light': dict(
        labels=['test top-1'], where=dict(experiment='shifted_light'),
        rows={norm: dict(model=norm) for norm in ('LN', 'BN', 'UN', 'UN+')},
        columns={'as it is': mean(TOP1, kind='as it is'), 'darker (x 0.4)': mean(TOP1, kind='darker'),
                 'brighter (x 1.8)': mean(TOP1, kind='brighter'), 'contrast x 0.4': mean(TOP1, kind='less contrast'),
                 'contrast x 1.8': mean(TOP1, kind='more contrast')}),
    'photographs_maskrcnn': dict(
        labels=['Mask R-CNN', 'machine'], where=dict(experiment='photographs_maskrcnn'),
        rows={**{(norm, 'Xeon'): dict(norm=norm, **PLAIN, **INTEL_BF16) for norm in ('LN', 'UN', 'UN+')},
              **{(label, 'EPYC'): dict(wanted, **AVX512) for label, wanted in {
                  **{norm: dict(norm=norm, **PLAIN) for norm in ('LN', 'UN')},
                  'UN, from the backbone with LN': dict(experiment='photographs_maskrcnn_start', **PLAIN),
                  'UN, `backbone.norm_eval=True`': dict(norm='UN', options={'model.backbone.norm_eval': 'True'}),
                  **{f'{norm}, rate 1e-3': dict(norm=norm, options={'optim_wrapper.optimizer.lr': '1e-3'})
                     for norm in ('LN', 'UN', 'UN+')},
                  'UN, from the backbone with LN, rate 1e-3': dict(
                      experiment='photographs_maskrcnn_start', options={'optim_wrapper.optimizer.lr': '1e-3'}),
                  'UN, from the backbone with LN, rate 1e-3, `backbone.norm_eval=True`': dict(
                      experiment='photographs_maskrcnn_start',
                      options={'optim_wrapper.optimizer.lr': '1e-3', 'model.backbone.norm_eval': 'True'})}.items()}},
        columns={f'{name}, seed {seed}': mean(metric, seed=seed, missing='')
                 for name, metric in (('box AP', BOX), ('mask AP', MASK)) for seed in range(3)}),
    # projects/low_light/README.md
    'enhancers': dict(
        labels=['enhancer'], where=dict(experiment='iat'),
        rows={'before': dict(norm='none'), 'IAT, LN': dict(norm='LN'), 'IAT, UN': dict(norm='UN')},
        columns={'PSNR, dB': mean('enhancement/PSNR'), 'SSIM': mean('enhancement/SSIM')}),
    'dark': dict(
        labels=['Mask R-CNN with UN, in the dark'], where=dict(experiment='dark'),
        rows={'trained on light scenes alone': dict(trained='light scenes alone'),
              'trained on dark scenes': dict(trained='dark scenes'), 'with a frozen IAT': dict(trained='frozen IAT'),
              'jointly with IAT': dict(trained='jointly with IAT')},
        columns=boxes()),
    # docs/results/conversion.md
    'conversion_adapted': dict(
        labels=['188 steps at 3e-4'], where=dict(experiment='conversion', condition='trained', **INTEL_BF16),
        rows={label: dict(way=way) for label, way in (
            ('LN, trained on', 'LN, trained on, rate 0.0003'),
            ('LN, with the teacher', 'LN, trained on, teacher, rate 0.0003'),
            ('UN, adapted, with the teacher', 'adapted, teacher, rate 0.0003'))},
        columns={'before them': mean(TOP1, condition='untrained'), **by_seed(TOP1, 3)}),
    'conversion_detector_adapted': dict(
        labels=['174 steps at 3e-4'], where=dict(experiment='conversion_detector', **INTEL_BF16),
        rows={label: dict(way=way) for label, way in (
            ('LN, trained on', 'LN, trained on, rate 0.0003'),
            ('UN, adapted, with the teacher', 'adapted, teacher, rate 0.0003'))},
        columns={'box AP before them': mean(BOX, condition='untrained'),
                 **{name: {**column, 'condition': 'trained'} for name, column in boxes().items()}}),
    'start': dict(
        labels=['Mask R-CNN'], where=dict(experiment='start', **AVX512),
        rows={'LN from LN': dict(norm='LN'), 'UN from LN, fitted alone': dict(start='LN', adapt=0),
              'UN from LN, fitted and adapted for 300 steps (the default)': dict(start='LN', adapt=300),
              'UN from a UN backbone': dict(start='UN')},
        columns=boxes()),
    # docs/results/int8.md
    'exact_int8': dict(
        labels=['ViT-S', 'test images'], where=dict(experiment='exact_int8'),
        rows={(label, images): dict(form=form, precision=precision, domain=domain, ranges=64)
              for domain, images in (('crops', '1,197 crops'), ('other', '191 crops of another domain'),
                                     ('probe', '500 photographs'))
              for label, form, precision in (
                  ('LN, float', 'LN', 'float'),
                  ('LN, float, noise on pixels', 'LN', 'float, noise of 1 gray level, worst of 3'),
                  ('LN, full-integer', 'LN', 'full-integer'),
                  ('exact, rotated, full-integer', 'exact, rotated', 'full-integer'))
              if domain == 'crops' or 'noise' not in precision},
        columns={label: dict(metric=metric, digits=digits, missing='') for label, metric, digits in (
            ('SNR, dB', 'snr', 1), ('centered correlation', 'centred', 3), ('worst image, dB', 'worst', 1),
            ('1 % of images below, dB', 'worst_percent', 1), ('same image found', 'same_image', 3),
            ('linear probe, top-1', 'probe', 1))}),
    'int8_swin': dict(
        labels=['digits Swin', 'weights'], where={},
        rows={**{(norm, 'from scratch'): dict(experiment='int8_wide_start', model=norm)
                 for norm in ('LN', 'BN', 'UN', 'UN+')},
              **{(model.partition(',')[0], weights): dict(experiment='int8_litert', model=model)
                 for model, weights in (('LN, trained on', 'trained on'), ('UN, converted', 'converted'))}},
        columns={'top-1, float': mean(TOP1, kind='float'),
                 **{f'{unit}, full-integer': dict(metric=metric, digits=digits, missing='', kind=FULL_INTEGER)
                    for unit, metric, digits in (('top-1', TOP1, 2), ('dB', 'snr', 1))}}),
    'int8_exact_digits': dict(
        labels=['digits Swin'], where=dict(experiment='int8_exact_digits'),
        rows={label: dict(fold=fold) for label, fold in (
            ('LN', 'offline'), ('exact', 'exact'), ('exact, rotated', 'rotated'))},
        columns={'top-1, float': mean(TOP1, kind='float'),
                 **{header: dict(metric=metric, digits=digits, form='mean', kind=FULL_INTEGER)
                    for header, metric, digits in (('top-1, full-integer', TOP1, 2), ('dB', 'snr', 1))}}),
    'int8_t2t': dict(
        labels=['T2T-ViT'], where=dict(experiment='int8_t2t'),
        rows={form: dict(kind=f'LiteRT INT8, {form}') for form in ('dynamic range', 'matmul-only')},
        columns={'top-1': dict(metric=TOP1, digits=1), 'dB': dict(metric='snr', digits=1)}),
    **{name: dict(
        labels=['Mask R-CNN'], where=dict(experiment=name), rows={norm: dict(model=norm) for norm in ('LN', other)},
        columns={f'{score} AP, {label}': mean(metric, kind=kind) for score, metric in (('box', BOX), ('mask', MASK))
                 for label, kind in (('float', 'float'), ('full-integer', 'LiteRT INT8, full-integer'))})
       for name, other in (('int8_detector_full', 'UN'), ('int8_exact_detector', 'exact'))},
    'int8_others': dict(
        labels=['digits Swin', 'INT8 of'], where={},
        rows={(norm, runtime): dict(experiment=experiment, model=norm, kind=f'{runtime} INT8')
              for experiment, runtime in (('int8', 'OpenVINO'), ('int8', 'ONNX Runtime'),
                                          ('int8_executorch', 'ExecuTorch')) for norm in ('LN', 'UN')},
        columns={'top-1': mean(TOP1), 'dB': dict(metric='snr', digits=1)}),
}
