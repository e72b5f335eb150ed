"""UN one token and one step at a time in float64 numpy, written from the spec and from nothing else.

The class has the methods of those in reference_family.py.
"""
import numpy as np


class ReferenceUN:

    def __init__(self, gamma, beta, window=4, alpha=0.9, warmup_iters=4000, outlier_filter=True,
                 eps=1e-5, forward_average='gm', backward_average='am',
                 backward_momentum=True, centered=False, eta=None, running_mean=0.):
        self.window, self.alpha, self.warmup_iters, self.eps = window, alpha, warmup_iters, eps
        self.outlier_filter = outlier_filter
        self.forward_average, self.backward_average = forward_average, backward_average
        self.backward_momentum = backward_momentum
        self.centered, self.eta = centered, eta
        self.gamma, self.beta = gamma, beta
        self.running_mean, self.running_var = running_mean + np.zeros_like(gamma), np.ones_like(gamma)
        self.psi = np.zeros_like(gamma)
        self.activations, self.gradients = [], []
        self.t = self.num_outliers = 0

    def forward(self, x, padded):
        self.t += 1
        self.x, self.padded = x, padded
        kept = x[~self.padded]
        mean = kept.mean(0) if self.centered is True else self.running_mean  # 0, or frozen
        self.running_mean = self.alpha * self.running_mean + (1 - self.alpha) * mean
        s = np.array([np.mean((kept[:, c] - mean[c]) ** 2) for c in range(x.shape[1])])
        self.warm = self.t <= self.warmup_iters or len(self.activations) < self.window
        self.outlier = False
        if self.warm:
            var_hat = s
        else:
            before = np.array(self.activations[-self.window:])
            omega = np.array(self.activations[-self.window:] + [s])[-self.window:]
            am, gm = omega.mean(0), np.prod(omega, axis=0) ** (1 / self.window)
            roots = np.sqrt(before)
            if self.outlier_filter:
                self.outlier = bool(np.any(am - gm > self.window * roots.var(ddof=1))) and self.window > 1
            ema = self.alpha * self.running_var + (1 - self.alpha) * s
            var_hat = s if self.outlier else dict(gm=gm, ema=ema, current=s)[self.forward_average]
        self.activations.append(self.running_var if self.outlier else s)
        self.num_outliers += self.outlier
        self.sigma = np.sqrt(var_hat + self.eps)
        self.z = (x - mean) / self.sigma
        kept = s if self.forward_average == 'ema' else var_hat  # an EMA is not averaged again
        self.running_var = self.alpha * self.running_var + (1 - self.alpha) * kept
        return self.gamma * self.z + self.beta + (0 if self.eta is None else self.eta * x)

    def backward(self, dy):
        dz = self.gamma * dy
        kept = ~self.padded
        g = np.mean((dz * self.z)[kept], axis=0)
        if self.outlier:
            used = g
            self.gradients.append(self.psi)
        elif self.warm:
            used = g
            self.gradients.append(g)
            self.psi = self._momentum(g)
        else:
            self.gradients.append(g)
            mean = g
            if self.backward_average == 'am':
                mean = np.mean(self.gradients[-self.window:], axis=0)
            used = self.psi = self._momentum(mean)
        g_mean = np.mean(dz[kept], axis=0) if self.centered is True else 0
        dx = (dz - kept[:, None] * (g_mean + self.z * used)) / self.sigma
        grads = dict(weight=np.sum(dy * self.z, axis=0), bias=np.sum(dy, axis=0))
        if self.eta is not None:
            dx = dx + self.eta * dy
            grads['eta'] = np.array([np.sum(dy * self.x)])
        return dx, grads

    def state(self):
        state = dict(running_var=self.running_var, num_batches_tracked=self.t)
        if self.backward_average == 'am' or self.backward_momentum:
            state['psi'] = self.psi
        if self.backward_average == 'am' and len(self.gradients) >= self.window:
            state['gradient_record'] = self.gradients[-self.window:]
        if self.outlier_filter:
            state['num_outliers'] = self.num_outliers
        return dict(state, running_mean=self.running_mean) if self.centered else state

    def _momentum(self, newest):
        return self.alpha * self.psi + (1 - self.alpha) * newest if self.backward_momentum else newest
