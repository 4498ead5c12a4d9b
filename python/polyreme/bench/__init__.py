"""Measurements against named rivals, as ratios taken in one run."""
