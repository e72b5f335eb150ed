"""UN's peers in float64, each from its own paper's equations, one step at a time. (MABN's are those of ReferenceUN.)

Every class has `forward(x, padded)` for `x` (B, C) and `padded` (B,) bool, `backward(dy)` with the gradient
of `x` and those of the parameters by name, and `state()` with what the layer must hold after the step.
"""
import numpy as np
import torch


class ReferencePN:
    """Shen et al., ICML 2020, Algorithm 2, with or without the layer scale before it."""

    def __init__(self, gamma, beta, layer_scale, alpha=0.9, warmup_iters=0, eps=1e-5):
        self.gamma, self.beta, self.layer_scale = gamma, beta, layer_scale
        self.alpha, self.warmup_iters, self.eps = alpha, warmup_iters, eps
        self.psi2, self.nu = np.ones_like(gamma), np.zeros_like(gamma)
        self.t = 0

    def forward(self, x, padded):
        self.t += 1
        self.kept = ~padded
        if self.layer_scale:
            self.size = np.sqrt((x ** 2).mean(1, keepdims=True) + self.eps)
            x = self.scaled = x / self.size
        psi2_now = (x[self.kept] ** 2).mean(0)
        self.exact = self.t <= self.warmup_iters
        self.psi = np.sqrt((psi2_now if self.exact else self.psi2) + self.eps)
        self.x_hat = x / self.psi
        self.psi2 = self.psi2 + (1 - self.alpha) * (psi2_now - self.psi2)
        return self.gamma * self.x_hat + self.beta

    def backward(self, dy):
        d_hat = self.gamma * dy
        gamma_t = (self.x_hat[self.kept] ** 2).mean(0)
        lambda_t = (d_hat * self.x_hat)[self.kept].mean(0)
        used = lambda_t if self.exact else self.nu
        dx = (d_hat - self.kept[:, None] * used * self.x_hat) / self.psi
        self.nu = self.nu * (1 - (1 - self.alpha) * gamma_t) + (1 - self.alpha) * lambda_t
        if self.layer_scale:
            inner = (dx * self.scaled).mean(1, keepdims=True)
            dx = (dx - self.scaled * inner) / self.size
        return dx, dict(weight=(dy * self.x_hat).sum(0), bias=dy.sum(0))

    def state(self):
        return dict(running_var=self.psi2, psi=self.nu)


class ReferenceFormula:
    """A norm without statistics over tokens: its formula in torch, differentiated by autograd."""

    def __init__(self, formula, **parameters):
        self.formula = formula
        self.parameters = {name: torch.from_numpy(value).requires_grad_() for name, value in parameters.items()}

    def forward(self, x, padded):
        self.x = torch.from_numpy(x).requires_grad_()
        self.y = self.formula(self.x, **self.parameters)
        return self.y.detach().numpy()

    def backward(self, dy):
        dx, *grads = torch.autograd.grad(self.y, [self.x, *self.parameters.values()], torch.from_numpy(dy))
        return dx.numpy(), {name: grad.numpy() for name, grad in zip(self.parameters, grads, strict=True)}

    def state(self):
        return {}


class ReferenceBN(ReferenceFormula):
    """Ioffe and Szegedy, ICML 2015; `eta` is RepBN's (Guo et al., ICML 2024)."""

    def __init__(self, alpha=0.9, eps=1e-5, **parameters):
        super().__init__(self._normalize, **parameters)
        self.alpha, self.eps = alpha, eps
        self.running_mean, self.running_var = np.zeros_like(parameters['bias']), np.ones_like(parameters['bias'])

    def forward(self, x, padded):
        self.padded, batch = torch.from_numpy(padded)[:, None], x[~padded]
        self.running_mean = self.alpha * self.running_mean + (1 - self.alpha) * batch.mean(0)
        self.running_var = self.alpha * self.running_var + (1 - self.alpha) * batch.var(0, ddof=1)
        return super().forward(x, padded)

    def _normalize(self, x, weight, bias, eta=0.):
        var, mean = torch.var_mean(x[~self.padded[:, 0]], 0, correction=0)
        # A loss ignores padding: gradients there are in no statistic.
        var, mean = (torch.where(self.padded, value.detach(), value) for value in (var, mean))
        return weight * (x - mean) / (var + self.eps).sqrt() + bias + eta * x

    def state(self):
        return dict(running_mean=self.running_mean, running_var=self.running_var)


def rmsn(x, weight, eps=1e-5):
    """Zhang and Sennrich, NeurIPS 2019, Eq. 4."""
    return weight * x / (x.square().mean(1, keepdim=True) + eps).sqrt()


def dyt(x, weight, bias, alpha):
    """Zhu et al., CVPR 2025, Algorithm 1."""
    return weight * torch.tanh(alpha * x) + bias


def derf(x, weight, bias, alpha, shift):
    """Chen et al., arXiv 2512.10938."""
    return weight * torch.erf(alpha * x + shift) + bias


def affine(x, weight=1, bias=0):
    """A scale and a shift, without normalization."""
    return weight * x + bias
