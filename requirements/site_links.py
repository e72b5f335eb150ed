"""For the site: links that leave docs/ become the paths themselves, and roles in docstrings plain code."""
import re
from posixpath import join, normpath


def on_page_markdown(markdown, page, config, files):
    def plain(match):
        path = normpath(join('docs', page.file.src_uri, '..', match[2]))
        return match[0] if path.startswith('docs/') else f'{match[1]} (`{path}`)'

    return re.sub(r'(?<!!)\[([^\]]+)\]\((\.\./[^)\s]+)\)', plain, markdown)


def on_page_content(html, page, config, files):
    return re.sub(r':(?:func|class|meth|mod|attr):(?=<code>)', '', html)  # Sphinx's roles in docstrings
