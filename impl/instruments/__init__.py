"""Instruments: what watches a target while it answers, without knowing what the answer should be.

`guards` poisons the outputs a target allocates itself, so that what was never written can be seen.
`audit` runs Triton kernels in Triton's interpreter over virtual memory and reports every access that
leaves a tensor or meets another program's write. Neither knows slots, pages or the contract: what a
finding means is for `kvproof.properties` to say.
"""
