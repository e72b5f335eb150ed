"""The fold rule of timm's models, whose norms `mmunorm.replace_norms` replaced; timm itself is not imported."""
from ..rules import fold_rule
from .images import as_it_is, on_images

fold_rule('timm.models', methods=())(
    lambda model: [on_images(model, as_it_is)] if hasattr(model, 'pretrained_cfg') else [])
