"""Constants of the semantics: they determine the bits of results and are never tunable."""

CHUNK = 64
"""How many ids of a bag (or occurrences of a row) are summed in order; the sums of such chunks are combined by the same
rule, recursively."""

ROW_LANES = 16
"""The number of interleaved sums by which a row's elements are reduced to one number (a rule's `sum`, `mean` and
`norm`, and the product of a gradient and a row): lane j adds elements j, j + 16, j + 32 ... in order, from +0.0. Then
lanes 8 apart are added, then 4, 2 and 1 apart (lane j += lane j + 8, ...). A lane without an element is +0.0 and is
added, too."""

PHILOX_ROUNDS = 10
"""The rounds of Philox4x32, the generator of stochastic rounding. Key: the seed's low and high 32 bits. Counter:
(column / 8, low 32 bits of the row, row >> 32 | table << 8, low 32 bits of the step t). The element of column c takes
16 bits: word c % 8 / 2 of the four, its low half for even columns."""
