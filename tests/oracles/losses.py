"""PPO's loss of one record, with scalars."""

import math


def ppo_record_loss(
    log_prob,
    old_log_prob,
    advantage,
    value,
    old_value,
    return_,
    entropy,
    clip,
    value_clip=None,
    vf_coef=0.5,
    ent_coef=0.0,
):
    """policy + vf_coef * value - ent_coef * entropy; also returns the three parts."""
    ratio = math.exp(log_prob - old_log_prob)
    limited = min(max(ratio, 1 - clip), 1 + clip)
    policy = -min(ratio * advantage, limited * advantage)
    value_part = (value - return_) ** 2
    if value_clip is not None:
        near = old_value + min(max(value - old_value, -value_clip), value_clip)
        value_part = max(value_part, (near - return_) ** 2)
    return policy + vf_coef * value_part - ent_coef * entropy, policy, value_part, entropy
