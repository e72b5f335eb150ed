"""IAT's LayerNorms become UN, and its outputs stay near without labels."""
import copy

import torch
from torch import nn

from mmunorm import adapt, convert_norms, fuse_norms

from .test_iat import trained


def uneven_teacher():
    """An IAT with LN whose tokens have standard deviations that depend on the light."""
    torch.manual_seed(0)
    model = trained('LN', torch.float32)
    branch = model.global_branch
    with torch.no_grad():
        branch.attn.v.weight.normal_(0, 0.2)
        branch.attn.queries.normal_()
        for module in (branch.conv1, branch.conv2, branch.position, branch.bn1, branch.bn2):
            module.bias.zero_()
        for norm in (branch.bn1, branch.bn2):
            norm.running_mean.zero_()
            norm.weight.mul_(3)
        branch.gamma.weight.mul_(5)
        branch.colour.weight.mul_(5)
    return model


def dark_images(number, seed):
    """Smooth images of several sizes, each with its own light."""
    generator = torch.Generator().manual_seed(seed)
    small = torch.rand(number, 3, 4, 4, generator=generator)
    light = torch.rand(number, 2, generator=generator)
    sizes = [((16, 24), (24, 16), (20, 20))[i % 3] for i in range(number)]
    return [nn.functional.interpolate(image[None], size, mode='bilinear')[0].mul(0.1 + 0.9 * a).pow(1 + 3 * b)
            for image, size, (a, b) in zip(small, sizes, light, strict=True)]


@torch.no_grad()
def psnr(model, teacher, images):
    errors = [(model(image[None]) - teacher(image[None])).square().mean() for image in images]
    return -10 * torch.stack(errors).log10()


def test_adapted_without_labels_on_images_of_several_sizes():
    teacher = uneven_teacher()
    model, given, unseen = copy.deepcopy(teacher), dark_images(24, 1), dark_images(12, 2)
    batches = [image[None] for image in given]
    report = convert_norms(model, batches)
    assert max(norm.cv for norm in report.converted) > 1
    model.local_branch.requires_grad_(False)  # it has no LayerNorm
    report = adapt(model, teacher, batches, 25, block_steps=5, batch_size=8, lr=2e-3, block_lr=1e-3)
    first, *_, last = report.agreements.values()
    assert last.tokens > first.tokens and last.score > first.score
    folded = copy.deepcopy(model)
    assert not fuse_norms(folded).kept
    assert psnr(folded, model, unseen).min() > 80
