"""Lambda-returns and V-trace as sums written out in float64, as in the papers."""

import numpy as np


def _last(t, ends):
    """The last step of the episode of step t, or of the stream."""
    return next((i for i in range(t, len(ends)) if ends[i]), len(ends) - 1)


def lambda_oracle(rewards, next_values, ends, gamma, gae_lambda):
    """The average of the n-step returns, each written out; the longest has the remaining weight."""
    result = np.zeros(len(rewards))
    for t in range(len(rewards)):
        longest = _last(t, ends) - t + 1
        for n in range(1, longest + 1):
            n_step = sum(gamma**i * float(rewards[t + i]) for i in range(n))
            n_step += gamma**n * float(next_values[t + n - 1])
            weight = gae_lambda ** (n - 1) * (1.0 if n == longest else 1 - gae_lambda)
            result[t] += weight * n_step
    return result


def vtrace_oracle(
    log_ratios, rewards, values, next_values, ends, gamma, gae_lambda, clip_rho, clip_c
):
    """Equation 1 of Espeholt et al. (2018) with lambda in the c's: targets and advantages."""
    steps = len(rewards)
    values, next_values = values.astype(float), next_values.astype(float)
    ratios = np.exp(log_ratios.astype(float))
    rho, c = np.minimum(clip_rho, ratios), gae_lambda * np.minimum(clip_c, ratios)
    targets, advantages = np.zeros(steps), np.zeros(steps)
    for t in range(steps):
        targets[t] = values[t]
        for s in range(t, _last(t, ends) + 1):
            surprise = rho[s] * (rewards[s] + gamma * next_values[s] - values[s])
            targets[t] += gamma ** (s - t) * np.prod(c[t:s]) * surprise
    for t in range(steps):
        after = next_values[t]
        if t < _last(t, ends):
            after = (1 - gae_lambda) * next_values[t] + gae_lambda * targets[t + 1]
        advantages[t] = rho[t] * (rewards[t] + gamma * after - values[t])
    return targets, advantages
