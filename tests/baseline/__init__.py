"""Digests of what this repository computes and compiles, so that a refactoring can show that it changed neither.

`digests.json` holds short hashes of results and of machine code; `fixtures/` holds files as an earlier version wrote
them, which must still load and mean the same. `make baseline` compares all of it; `make test` a telling part.

If a change alters a meaning on purpose, raise the schema number of what it alters (plans, stages, tuned records,
studies, traces, manifests, cache entries) and say so in CHANGELOG.md. Only then run `make baseline-write`, in a commit
of its own that says which digests changed and why.
"""
