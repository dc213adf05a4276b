"""The benchmarks of ``segue bench``, one module each. Their results are kept in ``benchmarks/results``.

A module's ``measure()`` returns a :class:`~segue.bench.result.BenchResult`, which has the tables with their titles and notes.
"""
