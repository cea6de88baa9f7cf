"""Tables whose ids are not their rows: the number that replaces each id before a lookup, and how an error finds the id.

The step writes the row of an id, or -1 if the id has none. An id that the table does not know becomes a number that no
lookup takes for a row, so that the checks of lookups and backwards find it like any other bad id; `refused_id` turns
that number back into the id.
"""

from __future__ import annotations

from embforge.codegen.dtypes import DTYPES
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec


def resolve_spec(spec: CollectionSpec) -> CollectionSpec:
    """The spec with nothing but what its `resolve` step depends on. Specs for which this is equal share the kernel."""
    tables = tuple(TableSpec(table.name, 1, 1, remap=None if table.ids_are_rows else 1) for table in spec.tables)
    remapped = {table.name for table in spec.tables if not table.ids_are_rows}
    features = tuple(
        FeatureSpec(f.name, f.table, padding_idx=f.padding_idx if f.table in remapped else None) for f in spec.features
    )
    return CollectionSpec(tables, features)


def refused_id(number: int, table: TableSpec, id_dtype: str) -> int | None:
    """The id for which a `resolve` step wrote a number that is not a row; None if an entry of the remap is not a row.

    With half = one more than the largest number of the id's format, and k = id + half (0 for the smallest id):

    id                                        number written   range of the number
    known, but its entry is not a row         rows             rows
    unknown, 0 or more                        -1 - id          -1 - num_ids and below
    negative, and k > rows                    k                rows + 1 and above
    negative, k <= rows and k + 2 <= num_ids  -2 - k           -num_ids to -2
    negative, other                           rows + 1         rows + 1

    The ranges differ, so the id can be computed from the number, except in the last case, for which no number is free:
    then the error names the id rows + 1 - half. The last case exists only if rows >= num_ids - 1, for the smallest ids
    of the format.
    """
    half = 2 ** (8 * DTYPES[id_dtype].bytes - 1)
    if number < 0:
        return -half - 2 - number if number >= -table.num_ids else ~number
    return None if number == table.num_embeddings else number - half


def bad_id(
    spec: CollectionSpec, feature: int, number: int, sample: int, position: int, id_dtype: str = "int64"
) -> IndexError:
    """The error for an id that its table does not have. `number` is what the lookup found: see `refused_id`."""
    name = spec.features[feature].name
    table = spec.table(spec.features[feature].table)
    where = f"of sample {sample}, position {position}"
    if table.remap is None:
        return IndexError(
            f"feature {name!r}: id {number} {where} is not a row of table {table.name!r}; allowed: 0 to "
            f"{table.num_embeddings - 1} ({table.num_embeddings} rows)"
        )
    unknown = refused_id(number, table, id_dtype)
    if unknown is None:
        return IndexError(
            f"feature {name!r}: the remap of table {table.name!r} has an entry that is no row for the id {where};"
            f" allowed: rows 0 to {table.num_embeddings - 1}, or -1 for an id without a row"
        )
    return IndexError(
        f"feature {name!r}: id {unknown} {where} is not an id of table {table.name!r}; allowed: 0 to "
        f"{table.remap - 1} ({table.remap} ids, which remap turns into rows)"
    )
