"""Measuring: how fast the recurrences run, how far they are from float64, and which tiles are best on a GPU.

Modules with a ``main`` are commands, run as ``python benchmarks/NAME.py`` in a clone or ``python -m
statemix.benchmarks.NAME`` anywhere; the others are what those and ``statemix bench`` are made of.
"""
