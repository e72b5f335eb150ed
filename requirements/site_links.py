"""For the site: pages of projects/ stand beside those of docs/, links to other files become the paths themselves, roles
in docstrings plain code, lists lists, and images links to themselves."""
import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath


def on_files(files, config):
    from mkdocs.structure.files import File  # only where the site is built
    root = Path(config.docs_dir).parent
    for path in sorted(root.glob('projects/*/*.md')):
        files.append(File.generated(config, path.relative_to(root).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown, page, config, files):
    here = page.file.src_uri
    folder = dirname(here if here.startswith('projects/') else f'docs/{here}')  # in the repository

    def on_site(match):
        text, link, anchor = match.groups()
        path = normpath(join(folder, link))
        if path.startswith('docs/') or re.match('projects/.*[.]md', path):
            return f'[{text}]({relpath(path.removeprefix("docs/"), dirname(here) or ".")}{anchor})'
        return f'`{path}`' if path.endswith(text) else f'{text} (`{path}`)'

    return with_lists(re.sub(r'\[([^\]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*|)\)', on_site, markdown))


def with_lists(markdown):
    """Lists and tables as Python-Markdown wants them, and not only GitHub: after an empty line; four spaces a level."""
    lines, in_code = [], False
    for line in markdown.split('\n'):
        before = lines[-1] if lines else ''
        if line.lstrip().startswith('```'):
            in_code = not in_code
        elif not in_code and before and starts_block(line, before):
            lines.append('')
        elif not in_code and line.startswith('  - '):
            line = f'  {line}'
        lines.append(line)
    return '\n'.join(lines)


def starts_block(line, before):
    """Whether a line starts a list or a table."""
    if line.startswith('|'):
        return not before.startswith('|')
    return line.startswith('- ') and not before.startswith(('- ', ' '))


def on_page_content(html, page, config, files):
    html = re.sub(r':(?:func|class|meth|mod|attr):(?=<code>)', '', html)  # Sphinx's roles in docstrings
    return with_full_images(html)


def with_full_images(html):
    """Each image links to its file: on a phone the page shows it too small to be read."""
    return re.sub(r'<img [^>]*src="([^"]+)"[^>]*>', r'<a href="\1">\g<0></a>', html)
