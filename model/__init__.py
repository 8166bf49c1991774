"""The contract of KV-cache slot allocators, as plain Python.

Standard library only: no torch, no third party, nothing else of kvproof. `paged.py` and `token.py`
are the specification; everything else here is the vocabulary they speak (configs, ops, calls, traces,
marks, errors). How a target is driven and checked is not here: see `kvproof.properties`.
"""
