"""Bugs that `make seeded` puts into copies of this repository, one at a time: each must make a test fail.

`bugs.toml` lists them: in `file`, `new` replaces `old`, and `caught_by` names tests of `make test` that then fail. The
bugs are mistakes that people make: a sign, a stride, an order of ranks, forgotten zeroing. If no test sees a bug, write
one. Comparisons with `generated/` and with the digests of `tests/baseline` do not count, because they fail after any
change of a template, good or bad.
"""
