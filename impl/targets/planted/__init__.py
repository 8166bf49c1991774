"""Planted faults: copies of our own allocators with one fault each, which the harness must find.

`catalogue` lists them, `copy` makes a copy, `target` offers it as `planted:ID`, and offers the canary.
"""
