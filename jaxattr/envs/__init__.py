"""Environments: the protocol for one, adapters, and the registry."""
