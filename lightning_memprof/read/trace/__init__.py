"""Operator traces: their text, events and columns."""
