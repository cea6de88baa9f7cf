"""Specs: what is refused and how, and that text forms read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from support.strategies import examples, specs

from embforge.codegen.dtypes import DTYPES, TABLE_DTYPES
from embforge.codegen.errors import SpecError
from embforge.codegen.params import params_type
from embforge.codegen.plan import Plan
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.codegen.spec_schema import json_schema

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "specs").glob("*.toml"))
TABLE = TableSpec("t", 10, 4)
GOOD = "[[table]]\nname = 't'\nnum_embeddings = 1\nembedding_dim = 1"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(name=""), r"table '': name='' is not allowed; allowed: a letter"),
        (dict(name="a b"), r"table 'a b': name='a b'"),
        (dict(name="1a"), r"table '1a': name='1a'"),
        (dict(num_embeddings=0), r"table 't': num_embeddings=0 .*1 to "),
        (dict(num_embeddings=-3), r"table 't': num_embeddings=-3"),
        (dict(num_embeddings=2.5), r"table 't': num_embeddings=2\.5"),
        (
            dict(num_embeddings="many"),
            r"table 't': num_embeddings='many' is not allowed; allowed: a whole number, such as",
        ),
        (dict(num_embeddings="1.5e0"), r"table 't': num_embeddings='1.5e0'"),
        (dict(num_embeddings="1e99"), r"table 't': num_embeddings=1000.* is out of range; allowed: 1 to "),
        (dict(num_embeddings=float("nan")), r"table 't': num_embeddings=nan"),
        (dict(num_embeddings=float("inf")), r"table 't': num_embeddings=inf"),
        (dict(num_embeddings=2.0**60), r"table 't': num_embeddings=1\.15"),
        (dict(embedding_dim=0), r"table 't': embedding_dim=0 .*1 to 16384"),
        (dict(embedding_dim=16385), r"table 't': embedding_dim=16385 .*1 to 16384"),
        (dict(embedding_dim=True), r"table 't': embedding_dim=True"),
        (dict(dtype="fp64"), r"table 't': dtype='fp64' is not known; allowed: 'fp32'.*'bf16'"),
        (dict(storage="disk"), r"table 't': storage='disk' is not known; allowed: 'static'"),
        (dict(dtype="FP8"), r"table 't': dtype='FP8' is not known \(did you mean 'fp8_e4m3'\?\); allowed: 'fp32'"),
        (dict(colour="red"), r"table 't': unknown field 'colour'; allowed: name, num_embeddings"),
        (dict(dtpye="fp32"), r"table 't': unknown field 'dtpye' \(did you mean 'dtype'\?\); allowed: name, "),
        (dict(rows=3), r"table 't': unknown field 'rows' \(did you mean 'num_embeddings'\?\); allowed: name, "),
        (dict(self=3), r"table 't': unknown field 'self'; allowed: name, "),
    ],
)
def test_a_wrong_table_is_refused_with_its_field_and_value(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        TableSpec(**dict(name="t", num_embeddings=10, embedding_dim=4) | fields)


def test_a_missing_field_of_a_table_is_named() -> None:
    with pytest.raises(SpecError, match="table 't': field 'embedding_dim' is missing"):
        TableSpec("t", 10)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(name="-"), r"feature '-': name='-'"),
        (dict(pooling="product"), r"feature 'f': pooling='product' is not known; allowed: 'sum'.*'none'"),
        (dict(pooling="maen"), r"feature 'f': pooling='maen' is not known \(did you mean 'mean'\?\); allowed: 'sum'"),
        (dict(pooling="avg"), r"feature 'f': pooling='avg' is not known \(did you mean 'mean'\?\)"),
        (dict(pooling="concat"), r"feature 'f': pooling 'concat' needs hotness.*hotness=None"),
        (dict(pooling="concat", hotness=0), r"feature 'f': hotness=0 .*1 to "),
        (dict(hotness=-1), r"feature 'f': hotness=-1"),
        (dict(pooling="max", weighted=True), r"feature 'f': weighted=True cannot go with pooling 'max'; allowed"),
        (dict(pooling="min", weighted=True), r"feature 'f': weighted=True cannot go with pooling 'min'; allowed"),
        (dict(pooling="minimum"), r"pooling='minimum' is not known \(did you mean 'min'\?\)"),
        (dict(weighted=1), r"feature 'f': weighted=1"),
        (dict(weights=True), r"feature 'f': unknown field 'weights' \(did you mean 'weighted'\?\); allowed: name"),
    ],
)
def test_a_wrong_feature_is_refused_with_its_field_and_value(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        FeatureSpec(**dict(name="f", table="t") | fields)


@pytest.mark.parametrize(
    ("tables", "features", "more", "message"),
    [
        ([], [FeatureSpec("f", "t")], {}, "tables is empty"),
        ([TABLE], [], {}, "features is empty"),
        ([TABLE, TABLE], [FeatureSpec("f", "t")], {}, "table 't': name='t' is used twice"),
        ([TABLE], [FeatureSpec("f", "t")] * 2, {}, "feature 'f': name='f' is used twice"),
        ([TABLE], [FeatureSpec("f", "u")], {}, "feature 'f': table='u' does not exist; allowed: t"),
        (
            [TableSpec(name, 1, 1) for name in ("users", "items")],
            [FeatureSpec("f", "usres")],
            {},
            r"table='usres' does not exist \(did you mean 'users'\?\); allowed: users, items",
        ),
        ([TABLE, TableSpec("u", 1, 1)], [FeatureSpec("f", "t")], {}, "table 'u': no feature looks it up"),
        (
            [TABLE],
            [FeatureSpec("f", "t", padding_idx=2**63)],
            {},
            "feature 'f': padding_idx=9223372036854775808 is out",
        ),
        ([TABLE], [FeatureSpec("f", "t")], dict(output_dtype="fp8_e4m3"), "output_dtype='fp8_e4m3' is not known"),
        ([TABLE], [FeatureSpec("f", "t")], dict(name="a/b"), "collection 'a/b': name='a/b'"),
    ],
)
def test_a_wrong_collection_is_refused_with_its_field_and_value(
    tables: Any, features: Any, more: Any, message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        CollectionSpec(tables, features, **more)


def test_a_table_is_found_by_name_and_an_unknown_name_lists_the_known() -> None:
    spec = CollectionSpec([TABLE], [FeatureSpec("f", "t")])
    assert spec.table("t") is spec.tables[0]
    with pytest.raises(SpecError, match="table 'u' does not exist; known: t"):
        spec.table("u")


@given(spec=specs())
@examples(50)
def test_a_spec_reads_back_from_its_dict_and_its_json(spec: CollectionSpec) -> None:
    assert CollectionSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    assert hash(CollectionSpec.from_dict(spec.to_dict())) == hash(spec)


@given(spec=specs())
@examples(20)
def test_toml_reads_back(tmp_path_factory: pytest.TempPathFactory, spec: CollectionSpec) -> None:
    path = tmp_path_factory.mktemp("specs") / "made.toml"
    path.write_text(spec.to_toml(), encoding="utf-8")
    read = CollectionSpec.from_toml(path)
    assert read.name == "made"  # the file's name, because the spec has none
    assert (read.tables, read.features, read.output_dtype) == (spec.tables, spec.features, spec.output_dtype)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[table", r"bad\.toml:1: cannot be read"),
        ("name = 'a'\n\nname = 'b'", r"bad\.toml:3: cannot be read: .*overwrite"),
        ('name = 1\nname = """\n\n', r"bad\.toml:2: cannot be read"),
        ("\ncolour = 'red'", r"bad\.toml:2: collection: unknown field 'colour'; allowed: name"),
        ("[[tables]]", r"bad\.toml:1: collection: unknown field 'tables' \(did you mean 'table'\?\)"),
        ("table = 3", r"bad\.toml:1: collection: table must be a list of \[\[table\]\] entries"),
        ("# a\n[[table]]\nname = 't'", r"bad\.toml:2: table 't': field 'num_embeddings' is missing"),
        (f"{GOOD}\nrows = 3", r"bad\.toml:5: table 't': unknown field 'rows'"),
        (f"{GOOD}\ndtype = 'fp33'", r"bad\.toml:5: table 't': dtype='fp33'"),
        (f"{GOOD}\n{GOOD}\n[[feature]]\nname='f'\ntable='t'", r"bad\.toml:6: table 't': name='t' is used twice"),
        (f"{GOOD}\n[[feature]]\nname='f'\n'table'='u'", r"bad\.toml:7: feature 'f': table='u' does not exist"),
        (f"{GOOD}\n[[feature]]\nname='f'\ntable='t'\npooling='concat'", r"bad\.toml:8: feature 'f': pooling"),
        (f"feature = [\n{{name='f', table='t'}},\n{{name='g', table='u'}}]\n{GOOD}", r"bad\.toml:3: feature 'g'"),
        (f'name = """\n[[table]]"""\n{GOOD}\n[[feature]]\nname="f"\ntable="t"', r"bad\.toml:1: collection "),
        (GOOD, r"bad\.toml: collection: features is empty"),
    ],
)
def test_a_wrong_spec_file_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SpecError, match=message):
        CollectionSpec.from_toml(path)


def test_a_missing_spec_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"none\.toml: no such spec file"):
        CollectionSpec.from_toml(tmp_path / "none.toml")


def test_specs_are_frozen() -> None:
    with pytest.raises(Exception, match="cannot assign"):
        TABLE.name = "u"  # type: ignore[misc]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_specs_read_back(path: Path, tmp_path: Path) -> None:
    spec = CollectionSpec.from_toml(path)
    again = tmp_path / path.name
    again.write_text(spec.to_toml(), encoding="utf-8")
    assert CollectionSpec.from_toml(again) == spec


def test_there_are_example_specs() -> None:
    assert {"dlrm", "llm_vocab", "mixed"} <= {path.stem for path in EXAMPLES}


def test_schema_names_every_field() -> None:
    schema = json.loads(json.dumps(json_schema()))
    table = schema["properties"]["table"]["items"]
    feature = schema["properties"]["feature"]["items"]
    assert list(table["properties"]) == ["name", "num_embeddings", "embedding_dim", "dtype", "storage", "remap"]
    assert list(feature["properties"]) == ["name", "table", "pooling", "weighted", "hotness", "padding_idx"]
    assert table["properties"]["dtype"]["enum"][:5] == ["fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2"]
    fields = [*table["properties"].values(), *feature["properties"].values()]
    fields += [schema["properties"][name] for name in ("name", "output_dtype")]
    assert all(field["description"].endswith(".") for field in fields)
    assert set(table["required"]) == {"name", "num_embeddings", "embedding_dim"}


def test_schema_has_the_rules() -> None:
    schema = json_schema()
    table, feature = (schema["properties"][kind]["items"] for kind in ("table", "feature"))
    assert table["additionalProperties"] is feature["additionalProperties"] is False
    bounds = {
        name: [(o["minimum"], o["maximum"]) for o in feature["properties"][name]["anyOf"] if o["type"] == "integer"]
        for name in ("hotness", "padding_idx")
    }
    assert bounds == {"hotness": [(1, 2**20)], "padding_idx": [(1 - 2**63, 2**63 - 1)]}
    rules = {rule["if"]["properties"]["pooling"]["const"]: rule["then"] for rule in feature["allOf"]}
    assert rules["concat"]["required"] == ["hotness"]
    assert rules["max"]["properties"] == {"weighted": {"const": False}}


def test_a_field_passed_twice_is_refused() -> None:
    with pytest.raises(SpecError, match="table 'x': name is passed twice"):
        TableSpec("t", 1, 2, name="x")  # type: ignore[misc]


def test_a_collection_name_that_is_no_text_is_not_quoted_as_its_name() -> None:
    with pytest.raises(SpecError, match=r"^collection: name=3: "):
        CollectionSpec([TABLE], [FeatureSpec("f", "t")], name=3)  # type: ignore[arg-type]


SPELLED = """output_dtype = "torch.float16"
[[table]]
name = "t"
num_embeddings = 1e6
embedding_dim = "1_6.0"
dtype = "BFloat16"
storage = "static"
[[feature]]
name = "f"
table = "t"
pooling = "sum"
weighted = false
hotness = 2e1
padding_idx = "1_000"
"""


def test_fields_in_any_spelling_make_the_same_spec(tmp_path: Path) -> None:
    (tmp_path / "spelled.toml").write_text(SPELLED, encoding="utf-8")
    spelled = CollectionSpec.from_toml(tmp_path / "spelled.toml")
    plain = CollectionSpec(
        [TableSpec("t", 1_000_000, 16, "bf16")],
        [FeatureSpec("f", "t", hotness=20, padding_idx=1000)],
        "fp16",
        "spelled",
    )
    assert spelled == plain
    assert hash(spelled) == hash(plain)
    assert spelled.to_toml() == plain.to_toml()
    plans = [Plan("forward", "cpu", "avx2", "int64", spec, params_type("cpu")()) for spec in (spelled, plain)]
    assert plans[0].uri == plans[1].uri


def test_numpy_numbers_and_torch_dtypes_are_understood() -> None:
    table = TableSpec("t", np.int64(10), np.uint8(4), torch.float16)  # type: ignore[arg-type]
    assert (table, type(table.num_embeddings)) == (TableSpec("t", 10, 4, "fp16"), int)
    assert FeatureSpec("f", "t", padding_idx="-1") == FeatureSpec("f", "t", padding_idx=-1)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", TABLE_DTYPES)
def test_every_spelling_of_the_schema_is_understood(dtype: str) -> None:
    spellings = json_schema()["properties"]["table"]["items"]["properties"]["dtype"]["enum"]
    found = {spelling: TableSpec("t", 1, 1, spelling).dtype for spelling in spellings}
    assert {spelling for spelling, name in found.items() if name == dtype} == set(DTYPES[dtype].spellings)


def test_a_mistake_in_a_file_with_windows_line_ends_has_its_line(tmp_path: Path) -> None:
    lines = "\r\n".join([*SPELLED.splitlines(), "hotnes = 3"])
    (tmp_path / "w.toml").write_bytes(b"\xef\xbb\xbf" + lines.encode())
    with pytest.raises(SpecError, match=r"w\.toml:15: feature 'f': unknown field 'hotnes' \(did you mean 'hotness'"):
        CollectionSpec.from_toml(tmp_path / "w.toml")
