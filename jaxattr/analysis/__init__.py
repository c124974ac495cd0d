"""Saved results in, tables and figures out."""
