"""docs/paper_tables.md names every config of the paper's tables, and only configs that exist."""
import re

from .tiny_runs import ROOT

FOLDER = ROOT / 'configs'
LINES = (ROOT / 'docs/paper_tables.md').read_text().splitlines()
ROWS = [[cell.strip() for cell in line[1:-1].split('|')] for line in LINES if line.startswith('|')]
# The 1x schedule of the ablations, with LN: their base, and in no table.
BASES = {'swin_t_ln_maskrcnn_1x', 'swin_t_ln_fasterrcnn_1x'}


def config_of(row):
    return re.fullmatch(r'\[(\w+)\]\(\.\./configs/((?:ablations/)?\w+)\.py\)', row[-2])


def test_every_row_links_a_config_under_its_name():
    rows = [row for row in ROWS if row[-1] != 'measured' and set(row[-1]) != {'-'}]
    assert len(rows) == 6 * 8 + 5 + 5 + 8 + 4
    for row in rows:
        match = config_of(row)
        assert match and match[2].endswith(match[1]), row
        assert (FOLDER / f'{match[2]}.py').is_file(), row
        # The paper's number, and room for one measured here.
        assert re.fullmatch(r'\d\d\.\d( / \d\d\.\d)?|FAIL|/|-', row[-3]), row
        assert re.fullmatch(r'(\d\d\.\d.*|FAIL.*)?', row[-1]), row


def test_every_config_of_the_tables_has_a_row():
    named = {config_of(row)[2] for row in ROWS if config_of(row)}
    there = {path.relative_to(FOLDER).with_suffix('').as_posix()
             for folder in (FOLDER, FOLDER / 'ablations') for path in folder.glob('*.py')}
    assert named == there - BASES


def test_a_row_has_the_norm_of_its_config():
    norms = dict(LN='ln', BN='bn', MABN='mabn', UN='un', RMSN='rmsn', PRepBN='prepbn', DyT='dyt')
    norms['PN*'] = 'pnstar'
    rows = [row for row in ROWS if row[0] in norms]
    assert len(rows) == 6 * 8
    assert all(f'_{norms[row[0]]}_' in row[-2] for row in rows)


def test_commands_name_what_exists():
    text = '\n'.join(LINES)
    for path in re.findall(r'(?:tools|configs)/[\w/]+\.(?:py|sh)', text):
        assert (ROOT / path.replace('NORM', 'bn')).is_file(), path
