"""Operator traces: reading them, and the time of steps, devices, operators and collectives."""
