"""Experiments on recorded rounds: counterfactual retraining, diagnosis by branching, behaviour, intervention."""
