"""Torch modules whose parameters are on servers."""
