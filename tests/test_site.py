"""What the site's hook makes of a page."""
import re
import runpy
from types import SimpleNamespace

from .tiny_runs import ROOT

HOOK = runpy.run_path(str(ROOT / 'requirements/site_links.py'))
with_lists = HOOK['with_lists']


def test_a_list_after_text_or_code_gets_an_empty_line():
    assert with_lists('Three:\n- a\n  b\n- c') == 'Three:\n\n- a\n  b\n- c'
    assert with_lists('```\n- code\n```\n- a') == '```\n- code\n```\n\n- a'


def test_a_table_after_text_or_code_gets_an_empty_line():
    assert with_lists('```\n| code\n```\n| a |\n|---|\n| b |') == '```\n| code\n```\n\n| a |\n|---|\n| b |'


def test_a_list_in_a_list_has_four_spaces():
    assert with_lists('- a\n  - b\n    c\n- d') == '- a\n    - b\n    c\n- d'


def test_other_lines_stay():
    text = '# T\n\n- a\n\n| x |\n|---|\n| - y |\n'
    assert with_lists(text) == text


def test_a_link_that_leaves_the_docs_is_a_path():
    page = SimpleNamespace(file=SimpleNamespace(src_uri='tutorials/page.md'))
    text = '[a.py](../../mmunorm/a.py), [a file](../../mmunorm/a.py), [a page](../fusion.md#x)'
    assert HOOK['on_page_markdown'](text, page, None, None) == (
        '`mmunorm/a.py`, a file (`mmunorm/a.py`), [a page](../fusion.md#x)')


def test_an_image_whose_text_has_brackets_is_found():
    page = SimpleNamespace(file=SimpleNamespace(src_uri='projects/deep/RESULTS.md'))
    assert HOOK['on_page_markdown']('![E[y^2] of a layer](../../docs/images/a.png)', page, None, None) == (
        '![E[y^2] of a layer](../../images/a.png)')


def test_text_after_code_is_a_paragraph():
    assert with_lists('```bash\na\n\nb\n```\ntext\nmore') == '```bash\na\n\nb\n```\n\ntext\nmore'


def test_options_in_code_do_not_break():
    assert HOOK['with_whole_options']('<p>a --b</p><code>a --num-samples 2 [-h] a-b</code>') == (
        '<p>a --b</p><code>a <span class="option">--num-samples</span> 2 [<span class="option">-h</span>] a-b</code>')


def test_a_image_links_to_its_file():
    image = '<img alt="a" src="../images/a.png">'
    assert HOOK['with_full_images'](f'<p>{image}</p>') == f'<p><a href="../images/a.png">{image}</a></p>'


def test_no_title_stands_twice_in_the_menu():
    titles = re.findall(r'^ *- (.+?):', (ROOT / 'mkdocs.yml').read_text().partition('\nnav:')[2], re.M)
    assert len(titles) > 20 and len(set(titles)) == len(titles)


def test_each_page_is_in_the_menu_once():
    pages = re.findall(r': (\S+\.md)$', (ROOT / 'mkdocs.yml').read_text(), re.M)
    assert sorted(pages) == sorted([*(str(page.relative_to(ROOT / 'docs')) for page in ROOT.glob('docs/**/*.md')),
                                    *(str(page.relative_to(ROOT)) for page in ROOT.glob('projects/*/*.md'))])
