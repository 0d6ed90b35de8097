"""Raising: what a program means, found in its dataflow whatever way it was written."""
