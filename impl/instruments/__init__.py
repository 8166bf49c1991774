"""Instruments: what watches a target while it answers, without knowing what the answer should be.

`guards` poisons the outputs a target allocates itself, so that what was never written can be seen.
`audit` runs Triton kernels in Triton's interpreter over virtual memory and reports every access that
leaves a tensor or meets another program's write. `fence` makes CUDA memory of which each tensor ends at an
unmapped page. `sanitizer` runs a process under compute-sanitizer and reads what it reports. `cost` sees
waits for a GPU, recompilations and launches. None knows slots, pages or the contract: what a finding means
is for `kvproof.properties` to say.
"""
