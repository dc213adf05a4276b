"""Measurements that end up in ``benchmarks/results``: one module each, run by ``segue bench``."""
