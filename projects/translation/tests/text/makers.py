"""Parallel text in a synthetic language: each word has one translation, and the order is reversed."""
import random

WORDS = 'the a small large fast old new file library server program game tool reads writes opens finds sends of for'


def word_pairs():
    return {word: word[::-1] + 'o' for word in WORDS.split()}


def sentence_pairs(count, seed=0):
    """So many different pairs of sentences of 3 to 12 words."""
    rng, words, pairs = random.Random(seed), word_pairs(), {}
    while len(pairs) < count:
        chosen = rng.choices(list(words), k=rng.randint(3, 12))
        pairs[' '.join(chosen)] = ' '.join(words[word] for word in reversed(chosen))
    return list(pairs.items())


def write_pairs(folder, name, pairs):
    """Writes NAME.src and NAME.tgt; returns their paths."""
    paths = [folder / f'{name}.src', folder / f'{name}.tgt']
    for path, side in zip(paths, zip(*pairs, strict=True), strict=True):
        path.write_text(''.join(f'{line}\n' for line in side), encoding='utf-8')
    return paths


def apt_lists(pairs, language='it', per_package=3):
    """A list of packages, English descriptions and translations, as apt has them, by file name.

    The first pair of each package is its title, and two packages come from one source.
    """
    packages, english, translated = [], [], []
    for k in range(0, len(pairs), per_package):
        name, source, md5 = f'pack{k}', f'source{k // (2 * per_package)}', f'{k:032x}'
        packages.append(f'Package: {name}\nSource: {source} (1.0-{k})\nVersion: 1.0\nDescription: short\n'
                        f'Depends: a,\n b\nDescription-md5: {md5}\n')
        title, *body = pairs[k:k + per_package]
        for side, (code, entries) in enumerate((('en', english), (language, translated))):
            paragraphs = '\n .\n'.join(f' {pair[side].capitalize()}.' for pair in body)
            entries.append(f'Package: {name}\nDescription-md5: {md5}\nDescription-{code}: {title[side]}\n'
                           f'{paragraphs}\n')
    return {'x_Packages': '\n'.join(packages), 'x_Translation-en': '\n'.join(english),
            f'x_Translation-{language}': '\n'.join(translated)}
