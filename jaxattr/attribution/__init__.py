"""Influence scores: targets, estimators, filters."""
