"""Pages as the site's hook rewrites them."""
import re
import runpy
from types import SimpleNamespace

import pytest

from tests.tiny_runs import ROOT

HOOK = runpy.run_path(str(ROOT / 'requirements/site_links.py'))


@pytest.mark.parametrize('text, rendered', [
    ('Three:\n- a\n  b\n- c', 'Three:\n\n- a\n  b\n- c'), ('```\n- code\n```\n- a', '```\n- code\n```\n\n- a'),
    ('```\n| code\n```\n| a |\n|---|\n| b |', '```\n| code\n```\n\n| a |\n|---|\n| b |'),
    ('- a\n  - b\n    c\n- d', '- a\n    - b\n    c\n- d'),
    ('# T\n\n- a\n\n| x |\n|---|\n| - y |\n', '# T\n\n- a\n\n| x |\n|---|\n| - y |\n'),
    ('Do:\n1. a\n   b\n2. c', 'Do:\n\n1. a\n   b\n2. c'),
    ('```bash\na\n\nb\n```\ntext\nmore', '```bash\na\n\nb\n```\n\ntext\nmore')])
def test_lists_tables_and_paragraphs(text, rendered):
    """Each begins after an empty line, and an inner list has four spaces."""
    assert HOOK['with_lists'](text) == rendered


@pytest.mark.parametrize('page, text, rendered', [
    ('page.md', '(see [notes](../benchmarks/NOTES.md)), ([notes](../benchmarks/NOTES.md))',
     '(see notes (`benchmarks/NOTES.md`)), (notes: `benchmarks/NOTES.md`)'),
    ('tutorials/page.md', '[a.py](../../mmunorm/a.py), [a file](../../mmunorm/a.py), [a page](../fusion.md#x)',
     '`mmunorm/a.py`, a file (`mmunorm/a.py`), [a page](../fusion.md#x)'),
    ('projects/deep/RESULTS.md', '![E[y^2] of a layer](../../docs/images/a.png)',
     '![E[y^2] of a layer](../../images/a.png)')])
def test_links_that_leave_the_docs_are_paths_and_images_are_found(page, text, rendered):
    page = SimpleNamespace(file=SimpleNamespace(src_uri=page))
    assert HOOK['on_page_markdown'](text, page, None, None) == rendered


def test_options_in_code_do_not_break():
    assert HOOK['with_whole_options']('<p>a --b</p><code>a --num-samples 2 [-h] a-b</code>') == (
        '<p>a --b</p><code>a <span class="option">--num-samples</span> 2 [<span class="option">-h</span>] a-b</code>')


def test_an_image_links_to_its_file_and_has_a_caption():
    image = '<img alt="a" src="../images/a.png">'
    link = f'<a href="../images/a.png">{image}</a>'
    figure = f'<figure>{link}<figcaption>a</figcaption></figure>'
    assert HOOK['with_full_images'](f'<p>text {image}</p>') == f'<p>text {link}</p>'
    assert HOOK['with_full_images'](f'<p>{image}\n{image}</p>') == f'{figure}\n{figure}'


def test_each_page_is_in_the_menu_once():
    pages = re.findall(r': (\S+\.md)$', (ROOT / 'mkdocs.yml').read_text(), re.M)
    assert sorted(pages) == sorted([*(str(page.relative_to(ROOT / 'docs')) for page in ROOT.glob('docs/**/*.md')),
                                    *(str(page.relative_to(ROOT)) for page in ROOT.glob('projects/*/*.md'))])
