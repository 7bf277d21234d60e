"""Deciding which implementation and config computes a problem."""
