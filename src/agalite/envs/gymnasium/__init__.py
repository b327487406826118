"""Gymnasium environments, both ways."""
