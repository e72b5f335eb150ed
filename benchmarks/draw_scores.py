"""Draws the figures of scores, SNRs and times in docs/ and projects/ from the rows in results/.

    python benchmarks/draw_scores.py                      # all of them
    python benchmarks/draw_scores.py comparison_t2t       # docs/images/comparison_t2t.png

Most figures show the rows of a table of score_tables.py, in its order.
"""
import argparse
import re
import sys
from pathlib import Path

from projects.deep.deep.figures import Quality, quality_figure
from projects.paper.paper.curves import COLOURS, NORM_COLOURS, metric_label
from projects.paper.paper.layout import finish, new_panels, save, wrapped

from matplotlib.lines import Line2D

sys.path.insert(0, str(Path(__file__).parent))

from row_tables import read
from score_tables import TABLES, TOP1
from write_scores import FAIL, load, scores, select, split_column, summary

FOLDER = Path(__file__).parents[1] / 'docs/images'
GREY = '0.55'
# By file: the table, the title, and in each panel, by its metric, the columns with their labels.
FIGURES = {
    'comparison_t2t': ('t2t', 'Digits T2T-ViT: a dot is a seed, a line the mean',
                       {TOP1: {'mean ± std': ''}}),
    'stress': ('stress_intel', 'Digits Swin, seed 0', {TOP1: {'calm': 'calm', 'stressed': 'stressed'}}),
}
DEPTHS = 'depth_quality'
FORM_COLOURS = {**NORM_COLOURS, 'exact': COLOURS[3]}  # LN folded exactly has a colour of its own


def draw(axes, data, table, metric, columns):
    """Draws a row of dots for each row of a table: of the last column full, of one before it open."""
    spec = TABLES[table]
    labels = list(spec['rows'])
    fills = ('none', 'full')[-len(columns):]
    for y, wanted in enumerate(spec['rows'].values()):
        means = []
        for header, fill in zip(columns, fills, strict=True):
            rows = select(data, spec['where'], wanted, split_column(spec['columns'][header])[1])
            if not rows:
                continue
            colour = NORM_COLOURS.get(rows[0]['norm'], GREY)
            found = summary(rows, metric)
            if found is None:
                axes.text(0.01, y, FAIL, color=colour, fontsize='small', va='center',
                          transform=axes.get_yaxis_transform())
                continue
            mean, spread, _ = found
            means.append(mean)
            if values := scores(rows, metric):
                axes.plot(values, [y] * len(values), 'o', color=colour, fillstyle=fill, alpha=0.7, zorder=3)
                if len(values) > 1:
                    axes.plot(mean, y, '|', color=colour, markersize=16, markeredgewidth=2)
            else:
                axes.errorbar(mean, y, xerr=spread, fmt='o', color=colour, fillstyle=fill, capsize=3, zorder=3)
        if len(means) > 1:
            axes.plot(means, [y] * 2, color=colour, linewidth=1, alpha=0.5)
    axes.set_yticks(range(len(labels)), [wrapped(short_label(label), 1.9) for label in labels], fontsize='small')
    axes.set(ylim=(len(labels) - 0.4, -0.6), xlabel=metric_label(metric))


def short_label(label):
    """The label of a row without what is in brackets or after a colon."""
    return re.sub(r' \(.*\)|:.*|`', '', label)


def figure_of(name, data):
    table, title, by_metric = FIGURES[name]
    figure, panels = new_panels(len(by_metric))
    for axes, (metric, columns) in zip(panels, by_metric.items(), strict=True):
        draw(axes, data, table, metric, columns)
    handles = {}
    if len(columns) > 1:
        handles = {label: Line2D([], [], color=GREY, linestyle='', marker='o', fillstyle=fill)
                   for label, fill in zip(columns.values(), ('none', 'full'), strict=True)}
    finish(figure, 0.29 * len(TABLES[table]['rows']), title, handles=handles)
    return figure


def depth_figure(data):
    """Top-1 against depth, one panel per residual scheme."""
    spec, results = TABLES['depth'], {}
    for (scheme, norm), wanted in spec['rows'].items():
        for column in spec['columns'].values():
            wanted_too = split_column(column)[1]
            mean, spread, _ = summary(select(data, spec['where'], wanted, wanted_too), TOP1)
            results.setdefault((scheme, norm), {})[wanted_too['layers']] = Quality(mean, spread, 0)
    return quality_figure(results, TOP1)


def snr_figure(data):
    """SNR of the ViT-S in full integers on each set of images, with LN and folded exactly."""
    table = TABLES['exact_int8']
    bars = {}
    for (label, images), wanted in table['rows'].items():
        if 'full-integer' in label:
            row, = select(data, table['where'], wanted)
            bars.setdefault(images, {})[label.partition(',')[0]] = row['metrics']['snr']
    return bar_figure('A pretrained ViT-S in full-integer INT8', 'SNR of the class token (dB)', bars)


def speed_figure(data):
    """Milliseconds of full-integer files with LN, folded exactly, and UN."""
    bars = {f'{row["network"]}, {row["threads"]} thread{"s" * (row["threads"] > 1)}': {
        form: row['ms'][form][1] for form in ('LN', 'exact', 'UN')} for row in read('exact_speed')}
    return bar_figure('Full-integer INT8 in LiteRT, an Intel Xeon', 'milliseconds an image', bars)


def bar_figure(title, xlabel, bars):
    """Horizontal bars, by the label of a group and the name of the form."""
    figure, (axes, ) = new_panels()
    forms = list(next(iter(bars.values())))
    height = 0.8 / len(forms)
    for index, form in enumerate(forms):
        values = [found[form] for found in bars.values()]
        places = [group + (index - (len(forms) - 1) / 2) * height for group in range(len(bars))]
        axes.bar_label(axes.barh(places, values, height, color=FORM_COLOURS[form], label=form), fmt='%.1f', padding=2,
                       fontsize='small')
    axes.set_yticks(range(len(bars)), [wrapped(label, 1.9) for label in bars], fontsize='small')
    axes.invert_yaxis()
    axes.margins(x=0.16)
    axes.set_xlabel(xlabel)
    finish(figure, 0.29 * len(bars) * len(forms), title)
    return figure


OTHERS = {DEPTHS: depth_figure, 'int8_vit': snr_figure, 'exact_speed': speed_figure}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('figures', nargs='*', metavar='FIGURE',
                        help=f'default: all of {", ".join((*FIGURES, *OTHERS))}')
    parser.add_argument('--out', type=Path, default=FOLDER)
    args = parser.parse_args(argv)
    if unknown := set(args.figures) - {*FIGURES, *OTHERS}:
        parser.error(f'no figure {", ".join(sorted(unknown))}; there are {", ".join((*FIGURES, *OTHERS))}')
    data = load()
    for name in args.figures or (*FIGURES, *OTHERS):
        path = args.out / f'{name}.png'
        save(OTHERS[name](data) if name in OTHERS else figure_of(name, data), path)
        print(f'written: {path}')


if __name__ == '__main__':
    main()
