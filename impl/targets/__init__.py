"""Adapters from the contract's calls to real allocators: ours, SGLang's releases, anybody's."""
