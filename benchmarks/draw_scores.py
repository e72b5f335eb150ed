"""Draws the figures of training scores in docs/ and projects/ from results/scores.jsonl.

    python benchmarks/draw_scores.py                      # all of them
    python benchmarks/draw_scores.py comparison_t2t       # docs/images/comparison_t2t.png

Each figure shows the rows of a table of score_tables.py, in its order.
"""
import argparse
import re
import sys
from pathlib import Path

from projects.deep.deep.figures import Quality, quality_figure
from projects.paper.paper.curves import NORM_COLOURS, metric_label
from projects.paper.paper.layout import finish, new_panels, save, wrapped

from matplotlib.lines import Line2D

sys.path.insert(0, str(Path(__file__).parent))

from score_tables import BOX, MASK, TABLES, TOP1
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


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('figures', nargs='*', metavar='FIGURE', help=f'default: all of {", ".join((*FIGURES, DEPTHS))}')
    parser.add_argument('--out', type=Path, default=FOLDER)
    args = parser.parse_args(argv)
    if unknown := set(args.figures) - {*FIGURES, DEPTHS}:
        parser.error(f'no figure {", ".join(sorted(unknown))}; there are {", ".join((*FIGURES, DEPTHS))}')
    data = load()
    for name in args.figures or (*FIGURES, DEPTHS):
        path = args.out / f'{name}.png'
        save(depth_figure(data) if name == DEPTHS else figure_of(name, data), path)
        print(f'written: {path}')


if __name__ == '__main__':
    main()
