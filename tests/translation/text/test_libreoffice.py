from mmunorm.translation.text.libreoffice import help_text, paragraphs

from .makers import write_help

PAGE = """<html><head><title>no</title></head><body><h1 id="hd_id1"><a name="x"></a>Save &amp; close</h1>
<p id="par_id2" class="paragraph">The <span class="avis">first <b>one</b></span>.
  It goes on.</p><p id="bm_id3">no</p><p>no</p>
<p id="par_id4">Press <span id="swlnsystem1" class="switchinline"><span hidden="true">Command</span>Ctrl</span>+1.</p>
<h2 id="par_id5">Last</h2>no</body></html>"""


def test_paragraphs_and_headings_by_id():
    assert paragraphs(PAGE) == {'hd_id1': 'Save & close', 'par_id2': 'The first one.\n  It goes on.', 'par_id5': 'Last'}


def test_pages_and_paragraphs_with_a_translation(tmp_path):
    write_help(tmp_path, [('The first one. It goes on.', 'Der erste. Es geht weiter.'), ('Last', 'Letzter')],
               page='b/1')
    write_help(tmp_path, [('Only one', None), ('Same', 'Same'), ('new words', 'neue Worte')], page='a/2')
    assert list(help_text(tmp_path, 'de')) == [
        ('help/text/a/2.html', ('new words', 'neue Worte')), ('help/text/b/1.html', ('The first one.', 'Der erste.')),
        ('help/text/b/1.html', ('It goes on.', 'Es geht weiter.')), ('help/text/b/1.html', ('Last', 'Letzter'))]
    (tmp_path / 'usr/share/libreoffice/help/de/text/b/1.html').unlink()
    assert len(list(help_text(tmp_path, 'de'))) == 1
