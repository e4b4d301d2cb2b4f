"""Policies inside servers that other people wrote."""
