"""Deliberately wrong attention, and who notices: ours and the rules that other projects publish.

    python -m benchmarks.mutants                    a sample of it, for CI
    python -m benchmarks.mutants --full             the whole study, which goes on where it was stopped

`attention` holds five honest algorithms on torch alone; the families (`numeric`, `casts`, `masks`, `index`, `cache`,
`merge`) change one method of them each. Nothing here uses `harness.faults`, `harness.directions` or the twins to make
an output: what the diagnosis compares with cannot be what it is tried on. `rules` re-expresses what others decide by,
`limit` says which effects are too small for this size and precision, `study` runs and records, `report` writes.
"""
