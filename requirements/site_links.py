"""For the site: pages of projects/ stand beside those of docs/, links to other files become the paths themselves, roles
in docstrings plain code, lists lists, images figures that link to their files, and options of commands do not break."""
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
        before, after = match.string[:match.start()][-1:], match.string[match.end():][:1]
        in_brackets = (before, after) == ('(', ')')
        return f'`{path}`' if path.endswith(text) else f'{text}: `{path}`' if in_brackets else f'{text} (`{path}`)'

    text = r'\[((?:[^\[\]]|\[[^\[\]]*\])*)\]'  # brackets may be in it once
    return with_lists(re.sub(text + r'\((?!https?:|#)([^)#\s]+)(#[^)\s]*|)\)', on_site, markdown))


def with_lists(markdown):
    """Lists, tables and text after code as Python-Markdown wants them, and not only GitHub: after an empty line; lists
    with four spaces a level.
    """
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
    """Whether a line starts a list, a table, or a paragraph after code."""
    if before == '```':
        return bool(line)
    if line.startswith('|'):
        return not before.startswith('|')
    if line.startswith('1. '):
        return True
    return line.startswith('- ') and not before.startswith(('- ', ' '))


def on_page_content(html, page, config, files):
    html = re.sub(r':(?:func|class|meth|mod|attr):(?=<code>)', '', html)  # Sphinx's roles in docstrings
    return with_whole_options(with_full_images(html))


def with_whole_options(html):
    """Options of commands in code, such as --num-samples, do not break at their hyphens."""
    option = r'(?<=[\s>(\[])--?[A-Za-z][\w-]*(?=[\s<=,)\]])'
    return re.sub('<code.*?</code>', lambda code: re.sub(option, r'<span class="option">\g<0></span>', code[0]), html,
                  flags=re.DOTALL)


def with_full_images(html):
    """Each image links to its file: on a phone the page shows it too small to be read. One that stands alone has its
    text as a caption.
    """
    image = r'<img alt="([^"]*)" src="([^"]+)"[^>]*>'
    html = re.sub(rf'<p>(?:{image}\s*)+</p>', lambda paragraph: re.sub(
        image, r'<figure>\g<0><figcaption>\1</figcaption></figure>', paragraph[0][3:-4]), html)
    return re.sub(image, r'<a href="\2">\g<0></a>', html)
