"""Generalised advantage estimation from its definition, a double sum."""

import numpy as np


def gae(reward, value, next_value, terminated, truncated, gamma, gae_lambda):
    """A_t = sum_l (gamma lambda)^l delta_{t+l}, up to and including the step that ends the episode."""
    steps = len(reward)
    delta = []
    for t in range(steps):
        bootstrap = 0.0 if terminated[t] else gamma * float(next_value[t])
        delta.append(float(reward[t]) + bootstrap - float(value[t]))
    advantage = []
    for t in range(steps):
        total, factor = 0.0, 1.0
        for s in range(t, steps):
            total += factor * delta[s]
            if terminated[s] or truncated[s]:
                break
            factor *= gamma * gae_lambda
        advantage.append(total)
    return np.array(advantage), np.array(delta)


def discounted_returns(reward, next_value, terminated, truncated, gamma):
    """Sum of discounted rewards up to the end of the episode or of the data, and what is expected after it."""
    steps = len(reward)
    out = []
    for t in range(steps):
        total, factor = 0.0, 1.0
        for s in range(t, steps):
            total += factor * float(reward[s])
            factor *= gamma
            if terminated[s]:
                break
            if truncated[s] or s == steps - 1:
                total += factor * float(next_value[s])
                break
        out.append(total)
    return np.array(out)
