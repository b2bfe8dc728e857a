"""Helpers that several families share; none of these modules is a family."""
