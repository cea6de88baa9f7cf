"""Specs: what is refused and how, and that text forms read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from strategies import examples, specs

from embforge.codegen.errors import SpecError
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec, json_schema

EXAMPLES = sorted((Path(__file__).parent.parent / "examples" / "specs").glob("*.toml"))
TABLE = TableSpec("t", 10, 4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(name=""), r"table '': name='' is not allowed; allowed: a letter"),
        (dict(name="a b"), r"table 'a b': name='a b'"),
        (dict(name="1a"), r"table '1a': name='1a'"),
        (dict(num_embeddings=0), r"table 't': num_embeddings=0 .*1 to "),
        (dict(num_embeddings=-3), r"table 't': num_embeddings=-3"),
        (dict(num_embeddings=2.5), r"table 't': num_embeddings=2\.5"),
        (dict(num_embeddings="10"), r"table 't': num_embeddings='10'"),
        (dict(embedding_dim=0), r"table 't': embedding_dim=0 .*1 to 16384"),
        (dict(embedding_dim=16385), r"table 't': embedding_dim=16385 .*1 to 16384"),
        (dict(embedding_dim=True), r"table 't': embedding_dim=True"),
        (dict(dtype="fp64"), r"table 't': dtype='fp64' is not known; allowed: 'fp32'.*'bf16'"),
        (dict(storage="disk"), r"table 't': storage='disk' is not known; allowed: 'static'"),
        (dict(colour="red"), r"table 't': unknown field 'colour'; allowed: name, num_embeddings"),
    ],
)
def test_bad_tables(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        TableSpec(**dict(name="t", num_embeddings=10, embedding_dim=4) | fields)


def test_missing_field_of_a_table() -> None:
    with pytest.raises(SpecError, match="table 't': field 'embedding_dim' is missing"):
        TableSpec("t", 10)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(name="-"), r"feature '-': name='-'"),
        (dict(pooling="median"), r"feature 'f': pooling='median' is not known; allowed: 'sum'.*'none'"),
        (dict(pooling="concat"), r"feature 'f': pooling 'concat' needs hotness.*hotness=None"),
        (dict(pooling="concat", hotness=0), r"feature 'f': hotness=0 .*1 to "),
        (dict(hotness=-1), r"feature 'f': hotness=-1"),
        (dict(pooling="max", weighted=True), r"feature 'f': weighted=True cannot go with pooling 'max'; allowed"),
        (dict(weighted=1), r"feature 'f': weighted=1"),
        (dict(weights=True), r"feature 'f': unknown field 'weights'; allowed: .*weighted"),
    ],
)
def test_bad_features(fields: dict[str, Any], message: str) -> None:
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
        ([TABLE, TableSpec("u", 1, 1)], [FeatureSpec("f", "t")], {}, "table 'u': no feature looks it up"),
        ([TABLE], [FeatureSpec("f", "t", padding_idx=10)], {}, "feature 'f': padding_idx=10 .*'t'; allowed: 0 to 9"),
        ([TABLE], [FeatureSpec("f", "t", padding_idx=-1)], {}, "feature 'f': padding_idx=-1 .*allowed: 0 to 9"),
        ([TABLE], [FeatureSpec("f", "t")], dict(output_dtype="fp8_e4m3"), "output_dtype='fp8_e4m3' is not known"),
        ([TABLE], [FeatureSpec("f", "t")], dict(name="a/b"), "collection 'a/b': name='a/b'"),
    ],
)
def test_bad_collections(tables: Any, features: Any, more: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        CollectionSpec(tables, features, **more)


def test_table_by_name() -> None:
    spec = CollectionSpec([TABLE], [FeatureSpec("f", "t")])
    assert spec.table("t") is spec.tables[0]
    with pytest.raises(SpecError, match="table 'u' does not exist; known: t"):
        spec.table("u")


@given(spec=specs())
@examples(50)
def test_text_forms_read_back(spec: CollectionSpec) -> None:
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
        ("[[table", r"bad\.toml: not a readable TOML file"),
        ("colour = 'red'", r"bad\.toml: collection: unknown field 'colour'; allowed: feature, name"),
        ("table = 3", r"bad\.toml: collection: table must be a list of \[\[table\]\] entries"),
        ("[[table]]\nname = 't'", r"bad\.toml: table 't': field 'num_embeddings' is missing"),
        ("[[table]]\nname = 't'\nnum_embeddings = 1\nembedding_dim = 1\nrows = 3", r"table 't': unknown field 'rows'"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SpecError, match=message):
        CollectionSpec.from_toml(path)


def test_missing_file(tmp_path: Path) -> None:
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
    assert list(table["properties"]) == ["name", "num_embeddings", "embedding_dim", "dtype", "storage"]
    assert list(feature["properties"]) == ["name", "table", "pooling", "weighted", "hotness", "padding_idx"]
    assert table["properties"]["dtype"]["enum"] == ["fp32", "fp16", "bf16", "fp8_e4m3"]
    assert set(table["required"]) == {"name", "num_embeddings", "embedding_dim"}


def test_schema_has_the_rules() -> None:
    schema = json_schema()
    table, feature = (schema["properties"][kind]["items"] for kind in ("table", "feature"))
    assert table["additionalProperties"] is feature["additionalProperties"] is False
    bounds = {
        name: [(o["minimum"], o["maximum"]) for o in feature["properties"][name]["anyOf"] if o["type"] == "integer"]
        for name in ("hotness", "padding_idx")
    }
    assert bounds == {"hotness": [(1, 2**20)], "padding_idx": [(0, 2**40 - 1)]}
    rules = {rule["if"]["properties"]["pooling"]["const"]: rule["then"] for rule in feature["allOf"]}
    assert rules["concat"]["required"] == ["hotness"]
    assert rules["max"]["properties"] == {"weighted": {"const": False}}


def test_a_field_given_twice() -> None:
    with pytest.raises(SpecError, match="table 'x': name is given twice"):
        TableSpec("t", 1, 2, name="x")  # type: ignore[misc]


def test_a_name_that_is_no_text_names_nothing() -> None:
    with pytest.raises(SpecError, match=r"^collection: name=3: "):
        CollectionSpec([TABLE], [FeatureSpec("f", "t")], name=3)  # type: ignore[arg-type]
