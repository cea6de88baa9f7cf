"""Bugs that `make seeded` puts into copies of this repository, one at a time: each must make a test fail.

`bugs.toml` lists them: in `file`, `new` instead of `old`, and the tests of `make test` that fail then. They are the
mistakes that people make: a sign, a stride, an order of ranks, zeroing that was forgotten. A bug that no test sees is a
finding: write the test. Comparisons with `generated/` and with the digests of `tests/baseline` catch nothing here,
because they see any change of a template, good or bad.
"""
