"""For the site: links that leave docs/ become the paths themselves, roles in docstrings plain code, lists lists, and
images links to themselves."""
import re
from posixpath import join, normpath


def on_page_markdown(markdown, page, config, files):
    def plain(match):
        path = normpath(join('docs', page.file.src_uri, '..', match[2]))
        if path.startswith('docs/'):
            return match[0]
        return f'`{path}`' if path.endswith(match[1]) else f'{match[1]} (`{path}`)'

    return with_lists(re.sub(r'(?<!!)\[([^\]]+)\]\((\.\./[^)\s]+)\)', plain, markdown))


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
