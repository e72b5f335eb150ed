"""Why a norm, a residual stream or an attention stays as it is: data, and one table of texts."""
from __future__ import annotations

from dataclasses import dataclass

# By code. Texts of what consumes a tensor follow 'its output' or the name of a part.
TEXTS = {
    # What consumes a tensor.
    'function': 'is consumed by {part}',
    'norm': 'is consumed by the norm {part}',
    'other norm': 'is consumed by the norm {part} and by another, or as several channels',
    'mixed': 'is consumed by {part} together with other values, such as padding',
    'dimension': 'is consumed by {part} along another dimension than its channels, or averaged with other values',
    'computed weight': 'is consumed by a layer with a computed weight',
    'padded convolution': 'is consumed by {part}, a {detail} convolution that pads with zeros',
    'another input': 'is consumed by {part}, which also has another input',
    'joined': 'is consumed by {part} together with other values',
    'empty': 'is concatenated with an empty tensor, which may not be empty at another size',
    'maybe padded': 'is padded by 0 at this input size, and may be padded at another',
    'output': 'is an output of the model, or stored by it',
    'unseen code': 'is consumed by {part}, code that is no Python',
    'nothing': 'is consumed by nothing',
    # Linear functions: they keep a norm from folding, and let a residual stream change its basis.
    **dict.fromkeys(('sum', 'scale'), 'is consumed by {part}'),
    'layer scale': 'is multiplied by {part}',
    **dict.fromkeys(('query', 'key', 'value'), 'is consumed by attention'),
    # A norm.
    'no example': 'no fold rule can run {part}: pass example=, such as torch.randn(1, 3, 224, 224)',
    'wrong example': '{part} does not run on the example of its fold rule ({detail}); pass another example= to '
                     'fuse_norms',
    'class': '{part} {detail}',
    'online': '{part} computes its statistics at inference',
    'kept on request': '{part} computes its statistics at inference; layer_norms="exact" folds the rest of it',
    'strict': '{part} computes its statistics at inference; without strict all but its statistics are folded',
    'infinite': 'its scale or shift is not finite',
    'shared': '{owner}is shared with {part}',
    'merge': '{owner}is part of {part}, whose merge() would undo the fold; merge it first (peft: merge_and_unload())',
    'alternative': 'it has the place of {part}, which did not run: one of the two has to go first',
    'hooks': '{owner}has forward hooks',
    'other forward': '{owner}has another forward than its class',
    'did not run': 'did not run on the example',
    'affine used': 'its weight or bias {cause}, too',
    'used': 'its output {cause}',
    'neighbor': 'its output is consumed by {part}, which {cause}',
    'weight used': '{owner}has a weight that {cause}, too',
    'computed bias': '{owner}has a bias that is not made of parameters alone',
    'weight type': 'its neighbor {part} has a weight of type {detail}, not a plain tensor',
    'neighbor held': 'its neighbor {part} {cause}',
    'mixes channels': 'it mixes channels, which cannot be folded into its neighbor {part}',
    'parts of a padded norm': '{part} reads parts of it, and zeros of padding',
    'mixes and pads': 'it mixes channels, and its output is padded with zeros or it folds with other norms',
    'padding token': '{detail} cannot represent the padding token that replaces zeros',
    'folded already': 'norms that fold with it are folded already',
    'joint': 'it cannot be folded past {part}: {cause}',
    'no layer': '{owner}is a {part}, not a linear layer or convolution',
    'parametrized': '{owner}has a parametrized weight',
    'other': '{detail}',
    'differs': '{detail} when it is folded: it has a consumer other than linear layers, another formula than its '
               'affine(), or a wrong fold rule',
    # A residual stream.
    'no float64': 'the model does not run in float64',
    'no stream': 'its input is no sum of outputs',
    'stream used': '{part} {cause}',
    'layouts': '{part} reads it in several layouts',
    'parts': '{part} reads or writes some of its channels alone',
    'groups': '{part} is a convolution with groups',
    'reader': 'it is read by {part}, which {cause}',
    'writer': 'it is written by {part}, which {cause}',
    'layer scales': 'several layers are multiplied by {part}',
    'zero scale': '{part} has channels of 0',
    'maps': '{part} returns maps, which would need a convolution of their own',
    'own layer': '{part} would need a linear layer of its own',
    'marker': '{part} is padded, and has channels of scale 0',
    'half': '{detail}',
    'stream differs': '{detail} if it has another basis',
}


@dataclass(frozen=True)
class Obstacle:
    """One reason. `str()` is half a sentence in plain words; programs ask for `code`.

    Attributes:
        code: a key of :data:`TEXTS`.
        part: full name of the module, parameter or function that it is about.
        detail: a number or a type, as text.
        cause: the reason behind it.
        owner: the name of a part with which the text begins; '' where the sentence has one.
    """
    code: str
    part: str = ''
    detail: str = ''
    cause: Obstacle | None = None
    owner: str = ''

    def __str__(self) -> str:
        return TEXTS[self.code].format(part=self.part, detail=self.detail, cause=self.cause,
                                       owner=f'{self.owner} ' * bool(self.owner))
