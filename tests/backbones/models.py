"""Shared by tests of backbones."""
import torch
from torch import nn


def randomize(model):
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def count(model, module_type):
    return sum(isinstance(module, module_type) for module in model.modules())


def assert_equals_stock(ours, stock, size=(32, 32), training=True):
    """The same names; after loading also the same outputs and gradients to the last bit, dropout included."""
    assert list(ours.state_dict()) == list(stock.state_dict())
    ours.load_state_dict(randomize(stock).state_dict())
    images, results = torch.randn(2, 3, *size), []
    for model in (ours, stock):
        model.train(training)
        torch.manual_seed(1)
        results.append(model(images))
        sum(output.square().mean() for output in results[-1]).backward()
    assert len(results[0]) == len(results[1]) and all(map(torch.equal, *results))
    for (name, parameter), other in zip(stock.named_parameters(), ours.parameters(), strict=True):
        assert torch.equal(other.grad, parameter.grad), name
