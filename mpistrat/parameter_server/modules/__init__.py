"""Torch modules that have their parameters on servers."""
