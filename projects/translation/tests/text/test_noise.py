import random

import pytest

from projects.translation.translation.text.noise import KINDS, add_noise


@pytest.mark.parametrize('kind, possible', [
    ('swap', 'eWb Wbe'), ('drop', 'eb Wb We'), ('double', 'WWeb Weeb Webb'), ('keyboard', 'qeb eeb Wwb Wrb Wev Wen'),
    ('case', 'wEB')])
def test_each_error_of_a_kind_comes_and_no_other(kind, possible):
    found = {add_noise('<2it> Web, 2 x: ', 1., [kind], random.Random(seed)) for seed in range(99)}
    assert found == {f'<2it> {word}, 2 x: ' for word in possible.split()}


def test_the_share_is_that_of_the_words():
    line = ' '.join(['reads'] * 4000)
    assert add_noise(line, 0., list(KINDS), random.Random(0)) == line
    words = add_noise(line, 0.25, ['drop', 'case'], random.Random(0)).split()
    assert len(words) == 4000 and 900 < sum(word != 'reads' for word in words) < 1100
    assert 400 < words.count('READS') < 600
    assert add_noise('ééé', 1., ['keyboard'], random.Random(0)) == 'ééé'
