"""Tables of speed, chips, training, models and of the paper for write_scores.py, each a function of rows of JSON.

`ROW_TABLES` has them by name; a function returns the header and the rows of cells. tables.jsonl has tables whose
numbers came from the log of one command: a row has its machine, command, seeds and cells.
"""
import json
import shlex
import statistics
from functools import partial
from pathlib import Path

RESULTS = Path(__file__).parent / 'results'
CHIPS = {'BM1688, CV186X': 'BM1688', 'BM1684X': 'BM1684X', 'Ethos-U85-512': 'ethos-u85-512',
         'Ethos-U65-512': 'ethos-u65-512', 'Ethos-U55-256': 'ethos-u55-256'}
NO_FILE = 'no kernel'
FORMS = 'LN', 'exact', 'UN'
UNEVEN = 0.05  # of the control, the same file in two processes
ROUNDS = 'UN / LN in a round: a quarter is below', 'a quarter is above'


def read(name):
    return [json.loads(line) for line in (RESULTS / f'{name}.jsonl').read_text().splitlines()]


def select(rows, **wanted):
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def only(rows, **wanted):
    row, = select(rows, **wanted)
    return row


def quartiles(ratio, digits=3):
    return f'{ratio["value"]:.{digits}f} ({ratio["low"]:.{digits}f} to {ratio["high"]:.{digits}f})'


# INT8.
def int8_families():
    """The SNR in each INT8 format of networks with random weights, by what was folded."""
    rows = read('export_families_int8')
    snr = {(row['model'], row['fold'], row['form']): f'{row["snr"]:.1f}' if 'snr' in row else 'fails' for row in rows}
    forms = list(dict.fromkeys(row['form'] for row in rows))
    return ['random weights, dB', 'norms', *forms], [
        [model.removeprefix('timm, '), fold, *(snr.get((model, fold, form), 'not measured') for form in forms)]
        for model, fold in dict.fromkeys((row['model'], row['fold']) for row in rows)]


def adapted_int8():
    """The ViT-S adapted to UN in full integers."""
    labels = {'crops': 'crops', 'other': 'crops of another domain'}
    rows = [row for row in read('exact_int8') if 'note' in row and row['form'].startswith('UN')]
    return ['adapted UN', 'images', 'dB to itself', 'dB to the original', 'centered correlation'], [
        [f'{row["form"]}, {row["precision"]}', f'{row["metrics"]["crops"]} {labels[row["domain"]]}',
         *(f'{row["metrics"][key]:.{digits}f}' if row['metrics'].get(key) is not None else '' for key, digits in (
             ('snr to itself', 1), ('snr', 1), ('centred', 3)))] for row in rows]


# Speed of exported files.
def exact_speed():
    header = ['network', 'threads', 'LN, ms', 'exact, ms', 'UN, ms', 'exact over LN', 'UN over LN']
    return header, [[row['network'], row['threads'], *(f'{row["ms"][form][1]:.1f}' for form in FORMS),
                     *(f'{row["speedup"][form]:.2f}x' for form in ('exact', 'UN'))] for row in read('exact_speed')]


def headline():
    """README's table: where folding gains, and where it does not."""
    rows = []

    def add(what, values, digits, **factors):
        rows.append([what, *('not measured' if value is None else f'{value:.{digits}f}' for value in values),
                     *(factors.get(form, '') for form in ('exact', 'UN'))])

    gpu = {(row['mode'], row['name']): row['throughput']['median'] for row in select(
        read('nvidia_h200'), model='swin_t_un_imagenet')}
    for mode, label in dict.fromkeys((mode, 'AMP' if 'fp16' in mode else 'float32') for mode, _ in gpu):
        base, un = gpu[mode, 'LN'], gpu[mode, 'UN folded']
        add(f'Swin-T, torch on an H200, {label}, images/s', (base, None, un), 0, UN=f'{un / base:.2f}x')
    for row in read('exact_speed'):
        add(f'{row["network"]}, full-integer, {row["threads"]} thread{"s" * (row["threads"] > 1)}, ms',
            [row['ms'][form][1] for form in FORMS], 1,
            **{form: f'{row["speedup"][form]:.2f}x' for form in ('exact', 'UN')})
    later = read('deployed_exact')
    swins = select(later, network='Swin-T')
    fastest = min(select(swins, model='LN'), key=lambda row: row['latency_ms']['median'])['format']
    for what, found, digits in (
            ('Mask R-CNN, full-integer, 1 thread, ms', select(later, network='Mask R-CNN'), 0),
            ('Swin-T, the fastest INT8 file with LN, 1 thread, ms', select(swins, format=fastest), 1)):
        found = {row['model']: row for row in found}
        add(what, [found[form]['latency_ms']['median'] for form in FORMS], digits,
            **{form: factor(found[form]) or 'no difference' for form in ('exact', 'UN')})
    chip = {row['norm']: row['ms'] for row in select(read('ethos_u_exact'), accelerator='ethos-u85-512')}
    add('DeiT-S, Arm Ethos-U85, estimate, ms', [chip[form] for form in FORMS], 1,
        **{form: f'{chip["LN"] / chip[form]:.2f}x' for form in ('exact', 'UN')})
    snr = {row['form']: row['metrics']['snr']
           for row in select(read('exact_int8'), precision='full-integer', domain='crops', ranges=64)}
    adapted = {row['domain']: row for row in select(read('real_vit'), model='adapted', form='full-integer')
               if 'domain' in row}
    add('pretrained ViT-S, full-integer, SNR to LN in float, dB',
        (snr['LN'], snr['exact, rotated'], adapted['crops']['snr']), 1)
    probe = {row['form']: row['metrics']['probe']
             for row in select(read('exact_int8'), precision='full-integer', domain='probe')}
    add('the same, linear probe, top-1, %',
        (probe['LN'], probe['exact, rotated'], 100 * adapted['probe']['accuracy']), 1)
    return ['224 x 224, one image', 'LN', 'LN folded exactly', 'UN folded', 'exact over LN', 'UN over LN'], rows


def deployed_exact(name='deployed_exact'):
    """Files of one machine with LN, LN folded exactly, and UN."""
    rows, lines = read(name), []
    for network, threads, label in dict.fromkeys((row['network'], row['threads'], row['label']) for row in rows):
        found = {row['model']: row for row in select(rows, network=network, threads=threads, label=label)}
        lines.append([network, threads, label, *(f'{found[form]["latency_ms"]["median"]:.1f}' for form in FORMS),
                      *(factor(found[form]) or 'no difference' for form in ('exact', 'UN')),
                      f'{found["UN"]["control"]["ratio"]["value"]:.3f}'])
    return [
        'network', 'threads', 'file', 'LN, ms', 'exact, ms', 'UN, ms', 'exact over LN', 'UN over LN', 'control'], lines


def factor(row, text='{:.2f}x'):
    """How much faster than LN a file is; '' if its quartiles contain 1, or the control differs by more."""
    speed, control = row.get('to_baseline'), row['control']['ratio']['value']
    if not speed or speed['low'] <= 1 <= speed['high'] or abs(speed['value'] - 1) <= abs(control - 1):
        return ''
    return text.format(speed['value'])


def deployed(name, cpu):
    """A row for each network, number of threads and file, of even runs; a factor where the control shows less."""
    rows = [row for row in read(name) if cpu in row['environment']['cpu'] and '16-bit' not in row['label']  # is gone
            and abs(row['control']['ratio']['value'] - 1) <= UNEVEN]
    rows.sort(key=lambda row: (row['network'] == 'Mask R-CNN', row['network'], row['threads']))
    lines = []
    for network, threads, label in dict.fromkeys((row['network'], row['threads'], row['label']) for row in rows):
        pair = {row['model']: row for row in select(rows, network=network, threads=threads, label=label)}
        if 'UN' in pair and not pair['UN'].get('error'):
            ms = {model: f'{row["latency_ms"]["median"]:.4g}' for model, row in pair.items() if not row.get('error')}
            lines.append([network, threads, label.replace('LiteRT INT8, ', 'LiteRT, '), ms.get('LN', NO_FILE), ms['UN'],
                          factor(pair['UN']) or 'no difference', f'{pair["UN"]["control"]["ratio"]["value"]:.3f}'])
    return ['network', 'threads', 'file', 'LN, ms', 'UN, ms', 'UN over LN', 'control'], lines


def deployed_xeon():
    return deployed('deployed_speed_intel_xeon', 'Xeon')


def deployed_epyc():
    return deployed('deployed_speed', 'EPYC')


def export_families():
    lines = []
    for row in read('export_families'):
        ms = {form: statistics.median(values) for form, values in row['ms'].items()}
        difference = row['difference']
        lines.append([row['model'], f'{row["folded"]} of {row["norms"]}',
                      f'{difference:.0e}' if difference else 'its head starts with 0', f'{ms["LN"]:.0f}',
                      f'{ms["UN"]:.0f}', f'{ms["LN"] / ms["UN"]:.2f}x', f'{ms["LN again"] / ms["LN"]:.2f}'])
    return ['model', 'norms folded', 'float file, to torch', 'LN, ms', 'UN, ms', 'UN over LN', 'control'], lines


# Chips.
def chip_cells(pair):
    """Milliseconds of LN and UN, and UN's speed-up."""
    ln, un = (pair.get(norm, {}).get('ms') for norm in ('LN', 'UN'))
    return [*(f'{ms:.4g}' if ms else 'fails' for ms in (ln, un)), f'{ln / un:.2f}x' if ln and un else '']


def chips():
    found = {}
    for row in read('chips'):
        if row['chip'] != 'RK3588':
            found.setdefault((row['network'], row['precision']), {}).setdefault(row['chip'], {})[row['norm']] = row
    for row in read('ethos_u'):
        found[row['network'], 'INT8'].setdefault(row['accelerator'], {})[row['norm']] = row
    for pairs in found.values():  # the compiler has one model of both chips
        if 'CV186X' in pairs:
            assert {norm: row['ms'] for norm, row in pairs['CV186X'].items()} == {
                norm: row['ms'] for norm, row in pairs['BM1688'].items()}
    networks = list(dict.fromkeys(network for network, _ in found))
    order = sorted(found, key=lambda key: networks.index(key[0]))
    return ['network', 'type', 'chip', 'LN, ms', 'UN, ms', 'UN over LN'], [
        [*key, label, *chip_cells(found[key][chip])] for key in order for label, chip in CHIPS.items()
        if chip in found[key]]


def ethos_exact():
    pairs = {}
    for row in read('ethos_u_exact'):
        pairs.setdefault(row['accelerator'], {})[row['norm']] = row['ms']
    return ['DeiT-S', 'LN, ms', 'exact, ms', 'UN, ms', 'exact over LN', 'UN over LN'], [
        [chip, *(f'{pairs[chip][form]:.1f}' for form in FORMS),
         *(f'{pairs[chip]["LN"] / pairs[chip][form]:.2f}x' for form in ('exact', 'UN'))]
        for chip in ('ethos-u85-512', 'ethos-u65-512', 'ethos-u55-256')]


def chip_failures():
    return ['network', 'norm', 'chip', 'type', "the compiler's message"], [
        [row['network'], row['norm'], row['chip'], row['precision'], f'`{row["error"].replace("|", chr(92) + "|")}`']
        for row in read('chips') if 'error' in row]


def chips_real_vit():
    """A pretrained ViT-S on Sophgo's chips: estimates, and accuracy in the simulator."""
    found = {}
    for row in read('chips_real_vit'):
        found.setdefault((row['chip'], row['precision'], row['opt']), {})[row['norm']] = row
    return ['chip', 'type', 'level of optimization', 'LN, ms', 'UN, ms', 'UN over LN'], [
        [chip, precision, opt, *chip_cells(pair)] for (chip, precision, opt), pair in found.items()]


def chips_int8():
    """LN's files and folded ones in the simulators of chips' compilers."""
    lines = []
    for row in sorted(read('chips_int8'), key=lambda row: [*(row[key] for key in ('network', 'images', 'chip', 'cure')),
                                                           row['form'] != 'LN']):
        score = f'{row["metrics"]["accuracy/top1"]:.1f} %' if 'metrics' in row else ''
        cells = ['fails', '', '', '', ''] if 'error' in row else [
            row['images_tested'], f'{row["snr"]:.1f}', f'{row["worst"]:.1f}', score,
            f'{row["ms"]:.2f}' if 'ms' in row else '']
        lines.append([row['network'], row['images'], row['chip'], row['cure'] or 'default', row['form'], *cells])
    return ['network', 'images', 'chip', 'file', 'norms', 'tests', 'SNR, dB', 'worst image, dB', 'top-1',
            'estimate, ms'], lines


# Training, and inference on a GPU.
def gpu_inference():
    names = {'swin_t_un_imagenet': 'Swin-T', 't2t_vit_14_un_imagenet': 'T2T-ViT-14',
             'swin_t_un_maskrcnn_3x': 'Mask R-CNN'}
    found = {}
    for row in read('nvidia_h200'):
        found.setdefault((row['model'], row['mode']), {})[row['name']] = row
    lines = []
    for (model, mode), forms in found.items():
        speeds = [row['throughput']['median'] for row in forms.values()]
        folded = [row for name, row in forms.items() if name not in ('LN', 'UN')]
        lines.append([names[model], 'AMP, float16' if 'fp16' in mode else 'float32',
                      *(f'{speed:.1f}' if speed < 100 else f'{speed:.0f}' for speed in speeds),
                      *(f'{row["to_ln"]["throughput"]["value"]:.3f}x' for row in folded),
                      f'{folded[0]["to_ln"]["peak_memory"]:.2f}'])
    forms = list(next(iter(found.values())))
    return ['images/s', 'type', *forms, *(f'{name} over LN' for name in forms[2:]), 'memory, folded / LN'], lines


def gpu_steps():
    lines, rows = [], read('train_step_nvidia_h200')
    for mode in ('eager', 'compiled'):
        for amp in (None, 'fp16'):
            pair = {row['norm']: row for row in select(rows, mode=mode, amp=amp)}
            if pair:
                lines.append([mode, 'AMP, float16' if amp else 'float32',
                              *(f'{pair[norm]["seconds"] * 1e3:.1f}' for norm in ('LN', 'UN')),
                              *rounds(pair['UN']['to_ln']), f'{pair["UN"]["peak_memory_to_ln"]:.2f}'])
    return ['', 'type', 'LN, ms', 'UN, ms', *ROUNDS, 'memory, UN / LN'], lines


def rounds(ratio):
    """The quartiles of single rounds, in which the clock is the same for both."""
    return [f'{ratio[key]:.3f}' for key in ('low', 'high')]


def cpu_steps():
    lines = []
    for name, machine in (('amd_epyc', 'AMD EPYC, 2 threads'),
                          ('intel_r_xeon_r_processor_2_50ghz', 'Intel Xeon, 1 thread')):
        rows = read(f'train_step_{name}')
        for arch in dict.fromkeys(row['arch'] for row in rows):
            pair = {row['norm']: row for row in select(rows, arch=arch)}
            lines.append([
                'Swin-T' if arch == 'tiny' else 'digits Swin', machine, pair['LN']['batch'],
                f'{pair["LN"]["seconds"] * 1e3:.0f}', *rounds(pair['UN']['to_ln'])])
    return ['float32', 'machine', 'batch', 'LN, ms', *ROUNDS], lines


# A pretrained ViT.
def adapted():
    h100 = [row for row in read('adapt_vit_nvidia_h100') if row['stage'] != 'trial']
    return ['', 'all tokens', 'centered class token', 'same image found'], [
        [row['stage'], *(f'{row[key]:.3f}' for key in ('tokens', 'pooled', 'same_image'))] for row in h100]


# The paper.
def paper(columns, **wanted):
    """A row for each norm or setting, a column for each model."""
    rows = [row for row in read('paper') if all(row.get(key) == value for key, value in wanted.items())
            and row['model'] in columns]
    lines = {}
    for row in rows:
        label = (row['norm'], ) if 'norm' in row else tuple(row['setting'].values())
        lines.setdefault(label, {})[row['model']] = row['paper']
    first = rows[0]
    header = ['norm'] if 'norm' in first else list(first['setting'])
    return one_number([*header, *columns.values()], [[*label, *(found.get(model, '') for model in columns)]
                                                     for label, found in lines.items()])


def one_number(header, rows):
    """Columns of `box AP / mask AP` and of `value (change)` as two columns each."""
    for i in reversed(range(len(header))):
        cells = [str(row[i]) for row in rows]
        if any(' / ' in cell for cell in cells):
            new, parts = [f'{header[i]}, box AP', f'{header[i]}, mask AP'], [cell.split(' / ') for cell in cells]
        elif all(cell.endswith(')') for cell in cells):
            new, parts = [header[i], 'change'], [cell.removesuffix(')').split(' (') for cell in cells]
        else:
            continue
        header = [*header[:i], *new, *header[i + 1:]]
        rows = [[*row[:i], *(part * 2)[:2], *row[i + 1:]] for row, part in zip(rows, parts, strict=True)]
    return header, rows


def paper_2():
    return paper({'Swin-T, ImageNet': 'Swin-T', 'T2T-ViT-14, ImageNet': 'T2T-ViT-14',
                  'T2T-ViT-14, CIFAR-10': 'CIFAR-10', 'T2T-ViT-14, CIFAR-100': 'CIFAR-100'}, table=2)


def paper_detectors():
    three, four = ({row['norm']: row for row in select(read('paper'), table=number)} for number in (3, 4))
    parts = ('AP50', 'AP75', 'AP_s', 'AP_m', 'AP_l')
    return one_number(['norm', 'Faster R-CNN, box AP', *parts, 'Mask R-CNN'], [
        [norm, three[norm]['paper']['AP'], *(three[norm]['paper'][part] for part in parts), four[norm]['paper']]
        for norm in three])


def paper_8():
    rows = select(read('paper'), table=8)
    return one_number(['RTX 3090', *rows[0]['paper']], [[row['model'], *row['paper'].values()] for row in rows])


def paper_averages():
    rows, others = select(read('paper'), table=5), select(read('paper'), table=9)
    return one_number([*rows[0]['setting'], 'Table 5', 'Table 9, BLEU', '`--norm`'], [
        [*row['setting'].values(), row['paper'], other['paper'], norm_option(row)]
        for row, other in zip(rows, others, strict=True)])


def norm_option(row):
    """What the command gives to --norm."""
    words = shlex.split(row['command'])
    return f'`{words[words.index("--norm") + 1]}`' if '--norm' in words else 'the recipe'


def paper_setting(number):
    """A row for each setting, a column for each model."""
    rows = [row for row in read('paper') if row['table'] == number and 'setting' in row]
    return paper({row['model']: row['model'] for row in rows}, table=number)


def paper_1():
    return paper({'IWSLT14 German to English': 'IWSLT14 de-en', 'WMT14 English to French': 'WMT14 en-fr'}, table=1)


def stored(name, columns=None):
    """A table of tables.jsonl, or some of its columns."""
    rows = [row['cells'] for row in select(read('tables'), table=name)]
    columns = columns or list(rows[0])
    return columns, [[row[column].replace('|', '\\|') for column in columns] for row in rows]


# The projects.
def zoo():
    """A column for each metric."""
    rows = [row['cells'] for row in select(read('tables'), table='zoo')]
    found = [dict(score.rsplit(' ', 1) for score in row['score'].split(', ')) for row in rows]
    metrics = list(dict.fromkeys(metric for scores in found for metric in scores))
    return ['model', *metrics, 'sha256 begins'], [
        [row['model'], *(scores.get(metric, '') for metric in metrics), row['sha256 begins']]
        for row, scores in zip(rows, found, strict=True)]


def residual_steps():
    found = {}
    for row in read('residual_step_amd_epyc'):
        name = {'digits, 48 layers': 'width 64, 48 layers'}.get(row['model'], row['model'])
        found.setdefault(f'{name}, {row["norm"]}', {})[row['scheme']] = quartiles(row['to_post_norm'])
    schemes = ('DeepNorm', 'BranchNorm', 'PreNorm')
    return ['', *schemes], [[name, *(cells[scheme] for scheme in schemes)] for name, cells in sorted(found.items())]


def low_light_speed():
    found = {}
    for row in read('low_light_speed_amd_epyc'):
        found.setdefault(tuple(row['shape'][2:]), {})[row['norm']] = row
    norms = [norm for norm in next(iter(found.values())) if norm != 'LN']
    return ['image', 'LN, ms', *(f'{norm} / LN' for norm in norms)], [
        [' x '.join(map(str, shape)), f'{rows["LN"]["seconds"] * 1e3:.0f}',
         *(f'{rows[norm]["to_ln"]["low"]:.2f} to {rows[norm]["to_ln"]["high"]:.2f}' for norm in norms)]
        for shape, rows in found.items()]


def translation_speed():
    return ['what', 'norm', 'tokens / s', 'time / LN'], [
        [row['what'], row['norm'], f'{row["tokens"] / row["seconds"]:.0f}', f'{row["to_ln"]["value"]:.2f}']
        for row in read('translation_speed_amd_epyc')]


# Which command writes a file of rows, by the beginning of its name.
COMMANDS = {
    'adapt_vit': 'benchmarks/adapt_vit.py', 'amd_epyc': 'benchmarks/fuse_models.py',
    'chips_int8': 'benchmarks/chips.py', 'chips': 'benchmarks/chips_time.py',
    'deployed_': 'benchmarks/deployed_speed.py', 'ethos_u': 'benchmarks/ethos_u.py',
    'exact_int8': 'benchmarks/exact_int8.py', 'exact_speed': 'files in rotation in one process',
    'export_families': 'benchmarks/export_families.py', 'gpu_': 'benchmarks/gpu.py', 'int8': 'benchmarks/int8.py',
    'low_light_speed': 'projects/low_light/tools/benchmark.py', 'model_zoo': 'benchmarks/model_zoo.py',
    'norm_layers': 'benchmarks/norm_layers.py', 'nvidia_h200': 'benchmarks/fuse_models.py',
    'paper': 'from the paper', 'real_vit': 'benchmarks/real_vit.py', 'residual_step': 'benchmarks/residual_step.py',
    'scores': 'benchmarks/write_scores.py', 'shifted_light': 'benchmarks/shifted_light.py',
    'tables': 'named in each row', 'tiny_layer': 'benchmarks/tiny_layer.py', 'train_step': 'benchmarks/train_step.py',
    'translation_speed': 'projects/translation/tools/benchmark.py',
    'vit_fit': 'weights and crops of adapt_vit.py, agreement and SNR'}


def data_files():
    """Each file of rows, what wrote it, and the machines that its rows name."""
    lines = []
    for path in sorted(RESULTS.glob('*.jsonl')):
        rows = read(path.stem)
        machines = {row.get('environment', {}).get('device') or row.get('device') or row.get('cpu')
                    or row.get('compiler') for row in rows} - {None}
        command = next((text for start, text in COMMANDS.items() if path.name.startswith(start)), '')
        lines.append([f'[{path.name}](../../benchmarks/results/{path.name})', len(rows),
                      f'`{command}`' if '/' in command else command, '; '.join(sorted(machines)).replace('(R)', '')])
    return ['file', 'rows', 'written by', 'measured on'], lines


ROW_TABLES = {function.__name__: function for function in (
    int8_families, adapted_int8, exact_speed, headline, deployed_exact, deployed_xeon, deployed_epyc,
    export_families, chips,
    ethos_exact, chip_failures, chips_real_vit, chips_int8, gpu_inference, gpu_steps, cpu_steps, adapted, paper_1,
    paper_2, paper_detectors, paper_8, paper_averages, residual_steps, low_light_speed, translation_speed,
    data_files)}
ROW_TABLES |= {f'paper_{number}': partial(paper_setting, number) for number in (6, 7, 10)}
ROW_TABLES['deployed_exact_avx2'] = partial(deployed_exact, 'deployed_exact_avx2')
ROW_TABLES |= {name: partial(stored, name) for name in dict.fromkeys(row['table'] for row in read('tables'))}
ROW_TABLES['zoo'] = zoo
